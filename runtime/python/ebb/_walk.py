"""From autograd to scopes: hooks on the modules of units find out when a unit's forward and backward begin and end.

  forward   opens at the first module of the unit; closes after a block, when the next unit opens, at the end of the model,
            or when backward starts
  backward  opens before the first node of the unit runs, at a hook on the nodes that made the unit's outputs. If the loss was
            computed from other tensors, it opens when a tensor is unpacked that the unit's forward has saved. It closes when
            the next unit's backward opens, or at the end of backward
  resident  its backward opens at the next forward with gradients or at step(), so that what comes into `.grad` before counts too
  left out  a batch may use a unit less often than the order says. If it leaves out the use whose backward takes the gradients, the walk
            opens and closes that use by itself, and in its backward the engine takes what the other backwards have left in `.grad`

A backward that gives no parameter a gradient, such as torch.autograd.grad for an input, only shows the units. The forward that it
goes through is not counted, because another one of the same micro-batch may follow.

No node is needed for the end. Autograd runs ready nodes by descending sequence number, and accumulates gradients of parameters
at once. So when the hook of the unit below fires, all gradients of the unit above are complete."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import nn

from ._library import BACKWARD, FORWARD, RECOMPUTE, SHOW, Error
from ._saved_tensors import InnerCheckpoints, WatchedSaves, function_around, is_checkpoint
from ._tensor_faults import reword
from ._units import Unit
from ._visits import Expected, Order, Scopes, Visit

_graph_task = torch._C._current_graph_task_id
_sequence_number = torch.autograd._get_sequence_nr
_engine = torch.autograd.Variable._execution_engine


class _Open(NamedTuple):
    visit: Visit
    kind: int
    scope: Any


class Walk:
    """How far a model has come in its forwards and backwards."""

    def __init__(self, model: nn.Module, units: list[Unit], scopes: Scopes):
        self.model = model
        self.scopes, self.units = scopes, units
        self.residents = [unit for unit in units if unit.keep_whole]
        self.forward: _Open | None = None
        self.backward: _Open | None = None
        self.again: _Open | None = None  # a recompute
        self.round = 0
        self.ending = False
        self.only_shows = False  # the backward that runs now gives no parameter a gradient
        self.calls = 0  # of the model
        self.calls_of_round = self.most_calls = 0  # with gradients, before one backward; and the most of any round
        self.shown: set[int] = set()  # the calls that such a backward goes through
        self.failure = ""  # of a forward or backward of the step, in words, because the exception would keep tensors
        self.expected = Expected(Order([]), units)  # the declared visits
        self.resident_ends: list[Visit] = []  # of a round whose backward has ended
        # The units that have their saved tensors watched: all at first; later those with a backward that began with a saved tensor.
        self.watch_saved = {unit.index for unit in units if not unit.keep_whole}
        self.saved_began: set[int] = set()
        self.saves, self.checkpoints = WatchedSaves(), InnerCheckpoints(len(units))
        self.handles: list[Any] = []
        self.attached: set[nn.Module] = set()
        self.last_hooks: dict[nn.Module, int] = {}  # the numbers of those that run after a module's forward
        self.is_paused = False  # hooks do nothing: a forward that another walk follows
        self._new_round()

    # Hooks.

    def attach(self) -> None:
        self.attach_units()
        # Residents may be read before the first unit runs.
        owners = {name.rpartition(".")[0] for unit in self.residents for name in unit.names}
        for path in owners | ({""} if self.residents else set()):
            self.handles.append(self.model.get_submodule(path).register_forward_pre_hook(never_compiled(self._before_residents), prepend=True))
        self.handles.append(self.model.register_forward_hook(never_compiled(self._model_ends), always_call=True))

    def attach_units(self) -> None:
        """Once more if units have got other modules, because theirs were not called."""
        for unit in self.units:
            alone = len(unit.modules) == 1
            for module in unit.modules:
                if module in self.attached:
                    continue
                self.attached.add(module)
                before, after = never_compiled(functools.partial(self._before, unit)), never_compiled(functools.partial(self._after, unit, alone))
                self.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self.handles.append(module.register_forward_hook(after, always_call=True, with_kwargs=True))
                self.last_hooks[module] = self.handles[-1].id

    def detach(self) -> None:
        self.attached.clear()
        self.last_hooks.clear()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _before(self, unit: Unit, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if self.is_paused:
            return
        # The unit is open for the hooks that the user has registered since.
        module._forward_hooks.move_to_end(self.last_hooks[module])
        if _graph_task() != -1:
            self._recompute(unit)
            return
        if self.forward is not None and self.forward.visit.unit is unit:
            self._watch_saves(module, self.forward.visit)
            return
        self._check_begin(unit)
        self._watch_open((arguments, keywords))
        self.settle()
        self.leave_spent()
        trains = torch.is_grad_enabled()
        around = None if trains else function_around()
        trains_here = trains or around is not None
        # One that the order lacks is an evaluation within the step, because the library would take it for a forward that a backward goes through.
        in_step = trains_here or (self.in_round and self.expected.has_one_without_gradients(unit))
        self._begin(in_step)
        visit = self._visit_of(unit) if in_step else Visit(unit, 0, self.round, self.calls)
        visit.trains = trains_here
        if around is not None:
            self.regions.setdefault(around, []).append(visit)
        self.forward = self._open(FORWARD, visit)
        if trains or around is not None:
            self.pending[unit.index].append(visit)
        self._watch_saves(module, visit)

    def _before_residents(self, module: nn.Module, arguments: Any) -> None:
        if self.is_paused or _graph_task() != -1 or self.forward is not None:
            return
        self.leave_spent()
        if self.in_round:
            return
        self._check_begin(self.residents[0])
        self._begin(torch.is_grad_enabled() or function_around() is not None)

    def _check_begin(self, unit: Unit) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Error(
                f"'{unit.name}' runs within torch.func (grad, vmap, jvp, ...), for which its parameters would be NaN: use loss.backward() and a loop "
                "over the samples, or torch.func on a model without an engine", "UNIMPLEMENTED"
            )
        self.check_whole()
        if self.backward is not None:
            raise Error(f"'{unit.name}' runs forward, but the backward before it ended with an error: call drop() to go on")

    def _after(self, unit: Unit, alone: bool, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        if self.is_paused:
            return
        if _graph_task() != -1:
            if self.again is not None and self.again.visit.unit is unit:
                if self.again.visit.is_repeated and torch.is_grad_enabled():
                    self._watch(self.again.visit, output, closes=False)
                if alone:
                    self._close_recompute()
            return
        self.saves.pop(module)
        open_here = self.forward
        if open_here is None or open_here.visit.unit is not unit:
            return
        if torch.is_grad_enabled():
            self._watch(open_here.visit, output, closes=alone)
        if alone:
            self._close_forward()

    def _model_ends(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if _graph_task() != -1 or self.is_paused:
            return
        self._watch_open(output)
        self._close_forward()
        self.calls += 1
        self.calls_of_round += self.in_round and torch.is_grad_enabled()
        self.most_calls = max(self.most_calls, self.calls_of_round)
        if len(self.residents) == len(self.units) and self.in_round and torch.is_grad_enabled():
            for tensor in tensors_with_nodes(output):  # no unit's backward will say that backward has begun
                tensor.grad_fn.register_prehook(lambda gradients: self._start_backward())
        error = sys.exc_info()[1]
        if output is None and error is not None:
            reword(error, self.fail(error, is_whole=not self.in_round))

    # Forward.

    def _begin(self, in_step: bool) -> None:
        if in_step:
            self.finish_round()
        self.scopes.begin(in_step)
        if in_step and not self.in_round:
            self.in_round = True
            for unit in self.residents:
                visit = Visit(unit, 0, self.round)
                scope = self.scopes.open(FORWARD, visit)
                self.scopes.close(FORWARD, visit, scope)
                self.resident_visits.append(visit)

    def expect(self, order: Order) -> None:
        """The declared Order of a round."""
        self.expected = Expected(order, self.units)

    def _visit_of(self, unit: Unit) -> Visit:
        """The next visit of the unit. Opens and closes those before it that take gradients and have been left out."""
        expected = self.expected
        at = expected.of(unit)
        if at is None:
            return self._counted(unit, -1)
        for number in range(expected.next, at):
            if expected.takes[number]:
                left_out = self._counted(self.units[expected.units[number]], expected.places_in_backward[number])
                self._close(self._open(FORWARD, left_out))
                self.left_out.append(left_out)
        expected.next = at + 1
        return self._counted(unit, expected.places_in_backward[at])

    def _counted(self, unit: Unit, place: int) -> Visit:
        visit = Visit(unit, self.counts[unit.index], self.round, self.calls)
        visit.place = place
        self.counts[unit.index] += 1
        return visit

    def _watch(self, visit: Visit, output: Any, closes: bool) -> None:
        for tensor in tensors_with_nodes(output):
            self._watch_node(visit, tensor.grad_fn)
            # In-place operations on a view replace its node, and keep its base's.
            if tensor._is_view() and tensor._base is not None:
                self._watch_node(visit, tensor._base.grad_fn)
                name = next((name for name, one in zip(visit.unit.names, visit.unit.parameters) if one is tensor._base), None)
                if closes and name is not None:
                    raise Error(
                        f"'{visit.unit.name}' gives a view of its parameter '{name}' to other modules, which would find another unit's values "
                        "there: give them a clone(), or name the parameter in resident="
                    )

    def _watch_open(self, values: Any) -> None:
        """Watches what the model itself has computed after a module of the open unit, perhaps with another parameter of that unit."""
        if self.forward is not None and torch.is_grad_enabled():
            self._watch(self.forward.visit, values, closes=True)

    def _watch_node(self, visit: Visit, node: Any) -> None:
        # An older node is not watched, because it belongs to the unit that made it.
        if node is not None and node._sequence_nr() >= visit.first_node:
            self.recomputes_inside = self.recomputes_inside or self.checkpoints.is_below(node, visit.unit.index, visit.first_node)
            node.register_prehook(functools.partial(self._reached, visit))

    def _watch_saves(self, module: nn.Module, visit: Visit) -> None:
        watches = visit.unit.index in self.watch_saved and len(visit.unit.modules) == 1
        self.saves.push(module, visit.unit, functools.partial(self._unpacks, visit) if watches else None)

    def _close_forward(self) -> None:
        opened, self.forward = self.forward, None
        self._close(opened)

    def _open(self, kind: int, visit: Visit) -> _Open:
        if self.only_shows:
            kind = SHOW
            self.shown.add(visit.call)
        return _Open(visit, kind, self.scopes.open(kind, visit))

    def _close(self, opened: _Open | None) -> None:
        if opened is not None:
            self.scopes.close(opened.kind, opened.visit, opened.scope)

    # Backward.

    def _reached(self, visit: Visit, gradients: Any) -> None:
        if self.backward is None or self.backward.visit is not visit:
            self._backward_begins(visit)

    def _unpacks(self, visit: Visit) -> None:
        if _graph_task() != -1 and (self.backward is None or self.backward.visit is not visit):
            self.saved_began.add(visit.unit.index)
            self._backward_begins(visit)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """drop() is asked for after an error within it, because resident parameters may have got a part of the gradient."""
        try:
            yield
        except Error as error:
            self.fail(error)
            raise

    def _backward_begins(self, visit: Visit) -> None:
        with self._failing():
            if visit.round != self.round:
                raise Error(
                    f"backward through a forward of '{visit.unit.name}' whose step, or whose backward, is over. Add the losses of one forward and call "
                    "backward once, and call torch.autograd.grad before backward. A forward that it has gone through ends when the model is called again"
                )
            if torch.is_grad_enabled() and not self._in_checkpoint():
                raise Error(f"backward of '{visit.unit.name}' with create_graph=True: second derivatives are not supported", "UNIMPLEMENTED")
            self._start_backward()
            self._close_recompute()
            self._close_backward()
            self.reached.add(visit.call)
            if not self.only_shows and visit in self.pending[visit.unit.index]:
                self.pending[visit.unit.index].remove(visit)
                visit.is_spent = False
                self._take_left_out(visit.place)
            self.backward = self._open(BACKWARD, visit)

    def _take_left_out(self, before: float) -> None:
        for visit in sorted((visit for visit in self.left_out if visit.place < before), key=lambda visit: visit.place):
            self.left_out.remove(visit)
            self._close(self._open(BACKWARD, visit))

    def _start_backward(self) -> None:
        self.settle()
        if not self.ending:
            self.only_shows = not self._gives_gradients()
            if not self.only_shows:
                self.checkpoints.settle()
                self.scopes.backward_begins()
            self.ending = True
            _engine.queue_callback(self._backward_ends)

    def _close_backward(self) -> None:
        opened, self.backward = self.backward, None
        self._close(opened)

    def _gives_gradients(self) -> bool:
        """Whether the backward that runs now puts a gradient into `.grad` of a parameter."""
        if (self.regions or self.recomputes_inside) and _engine.is_checkpoint_valid():
            return True  # a reentrant checkpoint has parameters in a graph of its own
        with torch._C.DisableTorchFunction():  # also of a mode that looks for reads
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    node = torch.autograd.graph.get_gradient_edge(parameter).node
                    try:
                        if torch._C._will_engine_execute_node(node):
                            return True
                    except RuntimeError:  # torch.autograd.grad returns this parameter's gradient
                        pass
            self.checkpoints.search_again(_engine.is_checkpoint_valid() and any(one.requires_grad for one in self.model.parameters()))
        return False

    def _backward_ends(self) -> None:
        self.ending = False
        self._close_recompute()
        self._close_backward()
        if self.only_shows:
            self._spend()
            return
        self._take_left_out(float("inf"))
        self.resident_ends = self.resident_visits
        waiting = {visit.call for visits in self.pending for visit in visits if not visit.is_spent}
        is_one_left_out = not waiting <= self.reached  # a call of the model in which no unit's backward has begun
        self._new_round()
        with self._failing():
            self.scopes.backward_ends(is_one_left_out)

    def _spend(self) -> None:
        """The calls that a backward without gradients has gone through do not count, unless another backward goes through them."""
        for index, visits in enumerate(self.pending):
            for visit in visits:
                if visit.call in self.shown and not visit.is_spent:
                    visit.is_spent = True
                    self.counts[index] -= 1
        self.only_shows = False
        self.shown.clear()

    def leave_spent(self) -> None:
        """Leaves a round whose calls are all spent, because the next forward may be one of another loop."""
        waiting = [visit for visits in self.pending for visit in visits]
        if waiting and all(visit.is_spent for visit in waiting):
            self._new_round()
            self.scopes.leave_round()

    def finish_round(self) -> None:
        """Hands over the gradients of resident parameters, with what the trainer's own code has put into `.grad` since backward."""
        visits, self.resident_ends = self.resident_ends, []
        for visit in reversed(visits):
            # A loop may have frozen it since the backward, as loops of GANs do.
            if visit.unit.parameters[0].requires_grad or any(parameter.grad is not None for parameter in visit.unit.parameters):
                self._close(self._open(BACKWARD, visit))

    def _new_round(self) -> None:
        self.round += 1
        self.calls_of_round = 0
        self.in_round = False  # a forward with gradients has come, and its backward has not ended
        self.expected.next = 0
        self.left_out: list[Visit] = []  # of those that take gradients, opened here
        self.resident_visits: list[Visit] = []
        # By the node of a torch.autograd.Function, such as a reentrant checkpoint: the visits that its forward has run without gradients.
        self.regions: dict[Any, list[Visit]] = {}
        self.recomputes_inside = False  # a unit's forward has a reentrant checkpoint in it
        self.reached: set[int] = set()  # the calls that a backward goes through
        self.counts = [0] * len(self.units)
        self.pending: list[list[Visit]] = [[] for _ in self.units]

    # Forwards that checkpointing repeats within backward.

    def _in_checkpoint(self) -> bool:
        node = torch._C._current_autograd_node()
        return node is not None and (node in self.regions or is_checkpoint(node))

    def _recompute(self, unit: Unit) -> None:
        if self.backward is not None and self.backward.visit.unit is unit and not self._is_new_reentrant(unit):
            self._close_recompute()
            return
        if self.again is not None and self.again.visit.unit is unit:
            return
        self._close_recompute()
        pending = self.pending[unit.index]
        if not pending:
            raise Error(f"'{unit.name}' is computed again in backward, but all its backwards are over")
        self._start_backward()  # here, because the backward within a reentrant checkpoint would end it too early
        region = self.regions.get(torch._C._current_autograd_node(), [])
        visit = next((one for one in reversed(pending) if not one.is_spent), pending[-1])
        if len(region) > 1:  # the backward of what it computes follows, and visits this unit after others
            visit = next((one for one in region if one.unit is unit and not one.is_repeated), visit)
            visit.is_repeated = True
            visit.first_node = _sequence_number()
        elif self._in_checkpoint() and torch.is_grad_enabled():  # the backward of what it computes follows at once
            self._backward_begins(visit)
            return
        self.again = self._open(RECOMPUTE, visit)

    def _is_new_reentrant(self, unit: Unit) -> bool:
        """Whether this is a further use of a block that is used several times, each time under a reentrant checkpoint."""
        return self._in_checkpoint() and bool(self.pending[unit.index])

    def _close_recompute(self) -> None:
        opened, self.again = self.again, None
        self._close(opened)

    # From outside.

    def settle(self) -> None:
        """Closes the open forward."""
        self.saves.pop()
        self._close_forward()

    def fail(self, error: BaseException, is_whole: bool = False) -> str:
        """The step of a forward or backward that has raised `error`, perhaps on this rank alone, ends with it on every rank. `is_whole`: no unit
        has run, so that nothing is left open here. Returns the words that the step ends with, perhaps of another rank."""
        text = self.failure or f"{type(error).__name__}: {error}"
        if not is_whole:
            self.failure = text
        return self.scopes.fail(text, "step" if torch.is_grad_enabled() else "evaluation" if is_whole else "", self.expected.units)

    def check_whole(self) -> None:
        if self.failure:
            raise Error(f"the forward or backward before ended with {self.failure}. Call drop() to go on")

    def forget(self) -> None:
        """Forgets open visits, because their step was dropped or has ended."""
        self.saves.pop()
        self.failure = ""
        self.forward = self.backward = self.again = None
        self.ending = self.only_shows = False
        self.shown.clear()
        self.resident_ends = []
        self._new_round()

    def forget_round(self) -> None:
        """Forgets the forwards since the last backward, but not what that backward has left for residents."""
        if not self.in_round:
            return
        if self.expected.next == len(self.expected.units) or not any(self.expected.takes):
            self._new_round()  # the next forward shows the units again
            return
        # The next forward is the order's next one. What takes the gradients of the forgotten one gets those of the others.
        for index, visits in enumerate(self.pending):
            declared = [number for number, unit in enumerate(self.expected.units) if unit == index]
            self.left_out += [visit for visit in visits if visit.number < len(declared) and self.expected.takes[declared[visit.number]]]
            visits.clear()

    def watch_less(self) -> None:
        """Stops watching the saved tensors of units whose backward has never begun with one."""
        self.watch_saved &= self.saved_began


def never_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook as it is, also in a model that is compiled as a whole: torch.compile would run a part of it while it traces the hook."""
    disabled = torch.compiler.disable(hook)
    disabled.__module__ = __name__
    return disabled


def tensors_with_nodes(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors with a node in tuples, lists, dicts, dataclasses and other objects with attributes."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_with_nodes(item, depth + 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_with_nodes(item, depth + 1)
    elif depth < 4 and not isinstance(value, (str, bytes, int, float, type(None), nn.Module, type)):
        attributes = getattr(value, "__dict__", None)
        if attributes:
            for item in attributes.values():
                yield from tensors_with_nodes(item, depth + 1)
