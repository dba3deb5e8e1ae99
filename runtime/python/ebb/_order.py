"""The order of a round: when each unit is visited, in forward and in backward.

One forward and backward shows it, with the hooks that training uses. Parameters and the batch are fake tensors, which have shapes but no
values. If the model does not run with fake tensors, and its parameters are still whole, real tensors are used. Otherwise the order is
that in which the model registers its modules."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import re
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ._blocks import local_of
from ._counted import counters_as_they_were
from ._fakes import ARRAY_BYTES_MAX, Fakes, classes_as_they_were, faked, give_back
from ._generators import generators_as_they_were
from ._hidden import tensors_in
from ._library import BACKWARD, FORWARD, SHOW, Error
from ._units import Unit, UnitsArgument, divide, owners, registration_order
from ._visits import Declared, Order, Scopes, Visit, in_turn
from ._walk import Walk, tensors_with_nodes
from .checks import Watch, storage

log = logging.getLogger("ebb")


@dataclass
class Call:
    """The arguments of a call of the model."""

    arguments: tuple
    keywords: dict
    is_reentrant: bool | None = None  # of the checkpoint around the call; None: there is no checkpoint


def of_registration(model: nn.Module, units: list[Unit]) -> Order:
    return of_visits(registration_order(model, units), seen=False)


class _Record(Scopes):
    """A record of the scopes that a walk opens and closes, without an engine."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}  # by the id of a visit, which is kept
        self.visits: list[Visit] = []
        self.events: list[tuple[int, int, int]] = []
        self.fakes: dict[int, torch.Tensor] = {}  # by the id of a parameter
        self.keys: dict[int, int] = {}  # of the fakes in a Watch, by the id of the parameter
        self.storages: list[torch.UntypedStorage] = []  # of the fakes
        self.hidden: dict[int, str] = {}  # parameters of closed units: the name, by the key of the fake
        self.outside: dict[str, None] = {}  # names that were used while their unit was closed
        self.in_step = False  # else scopes are those of an evaluation, such as a reference before the step, and have no place in the order

    def hide(self, unit: Unit) -> None:
        if not unit.keep_whole:
            self.hidden.update({self.keys[id(one)]: name for name, one in zip(unit.names, unit.parameters)})

    def read(self, name: str, what: str) -> None:
        self.outside[name] = None

    def begin(self, trains: bool) -> None:
        self.in_step = trains

    def open(self, kind: int, visit: Visit) -> None:
        if self.in_step and kind != SHOW:
            if id(visit) not in self.numbers:
                self.numbers[id(visit)] = len(self.visits)
                self.visits.append(visit)
            self.events.append((1, kind, self.numbers[id(visit)]))
        for parameter in visit.unit.parameters:
            self.hidden.pop(self.keys[id(parameter)], None)

    def close(self, kind: int, visit: Visit, scope: Any) -> None:
        if id(visit) in self.numbers and kind != SHOW:
            self.events.append((0, kind, self.numbers[id(visit)]))
        if kind == BACKWARD:
            for parameter in visit.unit.parameters:
                self.fakes[id(parameter)].grad = None
        self.hide(visit.unit)

    def used_outside(self, units: list[Unit]) -> list[str]:
        """The parameters that were read, or got gradients, while their unit was not open."""
        for unit in units:
            for name, parameter in zip(unit.names, unit.parameters):
                if self.fakes[id(parameter)].grad is not None:
                    self.outside[name] = None
        return list(self.outside)

    def leave_out_spent(self) -> None:
        """Forwards that had only backwards without gradients are not declared, because a step may have any number of them."""
        kept = [number for number, visit in enumerate(self.visits) if not visit.is_spent]
        place = {number: at for at, number in enumerate(kept)}
        self.visits = [self.visits[number] for number in kept]
        self.events = [(opens, kind, place[number]) for opens, kind, number in self.events if number in place]

    def add_left_out(self, units: list[Unit]) -> None:
        """The engine asks for a visit of each unit, so a unit that was left out, perhaps by chance, gets one."""
        for unit in units:
            visited = [visit.unit.index for visit in self.visits]
            if unit.index in visited:
                continue
            at = _place_of(unit, visited)
            self.visits.insert(at, Visit(unit, 0, 0))
            self.events = [(opens, kind, number + (number >= at)) for opens, kind, number in self.events]
            place = next((i for i, (_, kind, number) in enumerate(self.events) if kind != FORWARD or number > at), len(self.events))
            self.events[place:place] = [(1, FORWARD, at), (0, FORWARD, at)]

    def order(self) -> Order:
        has_backward = {visit for opens, kind, visit in self.events if opens and kind == BACKWARD}
        visits = [
            Declared(visit.unit.index, backward=number in has_backward, gradients=False, trains=visit.trains) for number, visit in enumerate(self.visits)
        ]
        if not has_backward:
            return of_visits([visit.unit.index for visit in self.visits])
        last: dict[int, int] = {}
        for opens, kind, visit in self.events:
            if opens and kind == BACKWARD:
                last[visits[visit].unit] = visit
        for number in last.values():
            visits[number].gradients = True
        for number, visit in enumerate(visits):
            # The loss does not depend on its output, so it has no backward. It is declared, because a step may leave it out.
            if visit.unit not in last and any(self.visits[number].unit.trainable):
                last[visit.unit] = number
                visit.backward = visit.gradients = True
                below = (i for i, (_, kind, other) in enumerate(self.events) if kind == BACKWARD and other < number)
                at = next(below, len(self.events))
                self.events[at:at] = [(1, BACKWARD, number), (0, BACKWARD, number)]
        return Order(visits, [] if self.events == in_turn(visits) else self.events, seen=True)


def _place_of(left_out: Unit, visited: list[int]) -> int:
    """Behind the unit that is registered before it."""
    return len(visited) - visited[::-1].index(left_out.index - 1) if left_out.index > 0 else 0


def of_visits(units: list[int], seen: bool = True) -> Order:
    first = {unit: place for place, unit in reversed(list(enumerate(units)))}  # to which backward comes last
    return Order([Declared(unit, gradients=first[unit] == place) for place, unit in enumerate(units)], seen=seen)


def order_of(model: nn.Module, units: list[Unit], example: Any, device: torch.device, is_whole: bool = True) -> Order:
    """`is_whole`: the engine does not own the parameters yet."""
    if example is None:
        return of_registration(model, units)
    is_whole = is_whole and not any(parameter.is_meta for parameter in model.parameters())
    fakes = Fakes()
    order, failure = _tried(model, units, example, device, fakes)
    fakes.end()
    if order is None and is_whole:
        order, failure = _tried(model, units, example, device, None)
        if order is None:  # else an evaluation can show it
            warn_of_registration(failure)
    return order or of_registration(model, units)


def _tried(model: nn.Module, units: list[Unit], example: Any, device: torch.device, fakes: Fakes | None) -> tuple[Order | None, str]:
    """The order, or what the model has raised for tensors without values. The exception itself would hold such tensors."""
    try:
        return observe(model, units, example, device, fakes), ""
    except Error:
        raise
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def warn_of_registration(failure: str) -> None:
    log.warning("the order of units is the order in which the model registers them, because it could not show another: %s", failure)


def of_evaluation(model: nn.Module, units: list[Unit], example: Any, walked: Callable[[], list[int]]) -> Order:
    """The order of the forward of an evaluation, in which the engine takes units as they come; `walked` gives them. Backward is taken to be in the
    reverse order. Raises what the model raises."""
    if isinstance(example, Call):
        example = Call(example.arguments, example.keywords)  # without a checkpoint, because nothing is computed again
    device = next(model.parameters()).device
    with torch.no_grad(), generators_as_they_were(model, example, device), _as_it_was(model, (*_LIBRARIES, "ebb", "functools")), _kept(model):
        contextvars.copy_context().run(_forward, model, example)
    visited = list(walked())
    for unit in units:
        if unit.index not in visited:
            visited.insert(_place_of(unit, visited), unit.index)
    return of_visits(visited)


def units_and_order(
    model: nn.Module, units: UnitsArgument, example: Any, resident: Iterable[str], device: torch.device
) -> tuple[list[Unit], Order]:
    """Divides the model into units and finds their order. If `example` uses a parameter outside of its unit, the parameter is made resident."""
    kept = list(resident)
    divided = divide(model, units, kept)
    order = order_of(model, divided, example, device)
    if order.outside:
        log.info("kept whole, because they are used outside of their module: %s", ", ".join(order.outside))
        divided = divide(model, units, kept + [re.escape(name) for name in order.outside])
        order = order_of(model, divided, example, device)
    return divided, order


def observe(model: nn.Module, units: list[Unit], example: Any, device: torch.device, fakes: Fakes | None) -> Order:
    """`example`: a batch (a tensor, a tuple of arguments, a dict of keywords), or a function that takes the model and returns the
    loss. `fakes`: None: with the model's real tensors. Raises what the model raises."""
    record, outside = _run(model, units, example, device, fakes)
    visited = {visit.unit.index for visit in record.visits}
    never = [unit for unit in units if unit.index not in visited and not unit.keep_whole]
    if never:  # modules that are not called, but whose inner ones are
        for unit in never:
            unit.modules = [owner for module in unit.modules for owner in owners(module)]
        record, outside = _run(model, units, example, device, fakes)
    record.add_left_out(units)
    order = record.order()
    order.outside = outside
    return order


def _run(model: nn.Module, units: list[Unit], example: Any, device: torch.device, fakes: Fakes | None) -> tuple[_Record, list[str]]:
    record = _Record()
    walk = Walk(model, units, record)
    is_here = device.type != "cuda" or torch.cuda.is_available()
    made = faked(model, device, fakes, keeps_buffers=is_here) if fakes else _kept(model)
    entered = contextlib.nullcontext() if is_here or not fakes else fakes
    with generators_as_they_were(model, example, device), entered, _as_it_was(model), uncompiled(), made as record.fakes:
        key = storage if fakes else id  # a fake has a storage of its own, so that views of it are known too
        record.keys = {number: key(tensor) for number, tensor in record.fakes.items()}
        # Alive as long as the keys: a storage that a module replaces through `.data` would leave its key to another tensor.
        record.storages = [local_of(tensor).untyped_storage() for tensor in record.fakes.values() if tensor.layout == torch.strided]
        for unit in units:
            record.hide(unit)
        walk.attach()
        try:
            with torch.enable_grad(), Watch(lambda tensor: record.hidden.get(key(tensor)), record.read):
                contextvars.copy_context().run(_forward_and_backward, model, example, fakes)
                walk.finish_round()
        finally:
            walk.detach()
            walk.settle()
            record.leave_out_spent()
        return record, record.used_outside(units)


def _forward(model: nn.Module, example: Any) -> None:
    with uncompiled(), _Undone():
        call(model, example)


def _forward_and_backward(model: nn.Module, example: Any, fakes: Fakes | None) -> None:
    with _Undone():
        loss = loss_of(call(model, example, fakes.from_tensor if fakes else lambda tensor: tensor))
        if loss is not None:
            _backward(loss)


class _Undone(TorchDispatchMode):
    """What is written within it to tensors that have values is taken back afterwards, such as a count in a tensor that is no buffer. The statistics
    of a batch norm are not: its operator does not say that it writes. So buffers are copied before (faked(), _kept())."""

    def __enter__(self) -> Any:
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if function._schema.is_mutable:
            for i, argument in enumerate(function._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for one in tensors_in(arguments[i] if i < len(arguments) else keywords.get(argument.name)):
                        if type(one) is torch.Tensor and id(one) not in self.before and one.nbytes <= ARRAY_BYTES_MAX:
                            with _disable_current_modes():
                                self.before[id(one)] = one, one.detach().clone()
        return function(*arguments, **keywords)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for tensor, before in reversed(self.before.values()):
                if tensor.shape == before.shape:
                    tensor.copy_(before)


def _backward(loss: torch.Tensor) -> None:
    """The backward of a torch.autograd.Function may read parameters. loss.backward() and torch.autograd.backward() would turn Watch off."""
    torch.autograd.Variable._execution_engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def uncompiled() -> Any:
    """Fake tensors have no memory. Compiled code would read it."""
    return torch.compiler.set_stance("force_eager")


def call(model: nn.Module, example: Any, change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Any:
    if callable(example) and not isinstance(example, torch.Tensor):
        return example(model)
    if isinstance(example, Call):
        given = [list(example.arguments), dict(example.keywords)]
        arguments, keywords = tree_map(lambda value: change(value) if isinstance(value, torch.Tensor) else value, given)
        run = model if example.is_reentrant is None else functools.partial(checkpoint, model, use_reentrant=example.is_reentrant)
        return run(*arguments, **keywords)
    changed = tree_map(lambda value: change(value) if isinstance(value, torch.Tensor) else value, example)
    if isinstance(changed, dict):
        return model(**changed)
    if isinstance(changed, (tuple, list)):
        return model(*changed)
    return model(changed)


def loss_of(output: Any) -> torch.Tensor | None:
    """A tensor to begin backward with: the loss of the output, or the sum of all outputs that need a gradient."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    parts = [tensor.float().sum() for tensor in tensors_with_nodes(output) if tensor.requires_grad and tensor.is_floating_point()]
    return sum(parts[1:], parts[0]) if parts else None


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LIBRARIES = ("torch", "transformers", "peft")  # their hooks are part of how a model computes


@contextlib.contextmanager
def _as_it_was(model: nn.Module, whose: tuple[str, ...] = _LIBRARIES) -> Iterator[None]:
    """Restores the attributes of all modules afterwards, and the contents of lists, dicts and sets among them. Removes the hooks of others than
    `whose` meanwhile, such as the user's, because they would see tensors without values."""
    modules = list(model.modules())
    attributes = [dict(module.__dict__) for module in modules]
    contents: dict[int, tuple[Any, Any]] = {}
    for values in attributes:
        contents.update({id(value): (value, value.copy()) for value in values.values() if isinstance(value, (dict, list, set, deque))})
    for module in modules:
        for table in _HOOKS:
            hooks = getattr(module, table)
            for number in [number for number, hook in hooks.items() if (getattr(hook, "__module__", None) or "").split(".")[0] not in whose]:
                del hooks[number]
    try:
        with counters_as_they_were(model), classes_as_they_were(model):
            yield
    finally:
        for container, before in contents.values():
            give_back(container, before)
        for module, values in zip(modules, attributes):
            module.__dict__.clear()
            module.__dict__.update(values)


@contextlib.contextmanager
def _kept(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """The model with its real tensors. Afterwards buffers have their old values again, and parameters have no gradients."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield {id(parameter): parameter for parameter in model.parameters()}
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter in model.parameters():
            parameter.grad = None
