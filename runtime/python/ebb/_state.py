"""An engine's state between forwards: whole values of parameters, which are gathered from the shards of all ranks, or written to them."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Callable, Iterable, Mapping

import torch
from torch import nn

from . import _library
from ._blocks import Block, block_of, is_dtensor, local_of
from ._fixed import Members
from ._hidden import Copied, Name, as_plain, guarded
from ._library import GRADIENT, MASTER, OPTIMIZER, Error, check, library
from ._steps import Steps
from ._tensors import Memory
from ._units import Unit
from ._walk import Walk
from ._world import World

GRADIENT_NAME = "gradient"


class State:
    """Is the _hidden.Owner of the parameters."""

    def __init__(self, model: nn.Module, world: World, memory: Memory, units: list[Unit], first_id: list[int], steps: Steps, walk: Walk):
        """`first_id`: for each unit, the library's number of its first parameter."""
        self.model = model
        self.world = world
        self.memory = memory
        self.steps = steps
        self.walk = walk
        self.thread = threading.get_ident()
        self.advice = ""
        self.members = Members(model)
        self.ids: dict[str, int] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.slots = {name: (steps.slots[unit.index], i) for unit in units for i, name in enumerate(unit.names)}
        for unit, first in zip(units, first_id):
            for i, (name, parameter) in enumerate(zip(unit.names, unit.parameters)):
                self.ids[name] = first + i
                self.parameters[name] = parameter
                parameter._ebb_name = Name(name, self)

    def check(self) -> None:
        if self.memory.closed:
            raise Error("the engine was closed")
        self.memory.check_process()

    def between_forwards(self, checks_writes: bool = True) -> None:
        self.check()
        self.walk.settle()
        self.walk.leave_spent()
        if checks_writes:
            self.members.check()
            self.steps.check_writes()
        self.steps.finish_evaluation()

    def between_steps(self, call: str) -> None:
        self.between_forwards()
        if self.steps.in_step:
            raise Error(f"{call}() within a step: call it after step(), or drop() the step")

    @property
    def is_suspended(self) -> bool:
        return not self.steps.slots[0].views

    def agree(self, own: Error | None, cause: BaseException | None) -> None:
        """Collective: raises the error of the first rank that has one, on every rank. Ranks of a suspended engine tell each other nothing."""
        try:
            if not self.is_suspended:
                check(library.ebb_engine_agree(self.memory.handle, None if own is None else str(own).encode()))
            elif own is not None:
                raise own
        except Error as error:
            raise error from cause

    # Of _hidden.Owner.

    def has_taken(self, name: str) -> bool:
        return name in self.steps.taken

    def brings_in(self, name: str) -> bool:
        self._show_whole()
        return self.slots[name][0].stays

    def makes_current(self) -> bool:
        if self.steps.whole.is_stale and self._may_show():
            with torch.no_grad(), as_plain():
                self.steps.whole.show_residents()
        return not self.steps.whole.is_stale

    def _show_whole(self) -> None:
        if self._may_show():
            with torch.no_grad(), as_plain():
                self.steps.whole.show()

    def _may_show(self) -> bool:
        return not (self.steps.in_step or self.memory.closed or self.is_suspended) and threading.get_ident() == self.thread

    def fail(self, error: Error) -> None:
        is_here = os.getpid() == self.memory.process and threading.current_thread() is threading.main_thread()
        if is_here and self.steps.in_step:
            with as_plain():
                self.walk.fail(error)

    # Whole values.

    def gather(self, name: str, rank: int = -1, master: bool = False, state: str = "") -> torch.Tensor | None:
        """Collective: as Engine.gather(), by the engine's name. Local while the parameter shows its value between steps."""
        slots, i = self.slots[name]
        if not master and not state and not is_dtensor(self.parameters[name]) and (slots.stays or self.brings_in(name)):
            return slots.views[i].detach().to("cpu", copy=True) if rank in (-1, self.world.rank) else None
        self.between_forwards(checks_writes=False)  # of many parameters in turn
        if state == GRADIENT_NAME:
            self._end_backwards()
        shape = self.parameters[name].shape
        here = rank in (-1, self.world.rank)
        whole = torch.empty(shape, dtype=torch.float32, device="cpu") if here else None
        address = whole.data_ptr() if here else 0
        self.gather_pieces(name, lambda values, begin, end: ctypes.memmove(address + 4 * begin, values, 4 * (end - begin)), rank, state)
        if state == GRADIENT_NAME and here and (scale := self.steps.scale_of_sums()) != 1:
            whole *= scale
        return whole if master or state or whole is None else whole.to(self.parameters[name].dtype)

    def gather_pieces(self, name: str, piece: Callable[[Any, int, int], None], rank: int, state: str = "") -> None:
        """Collective: calls `piece`(pointer to fp32 values, begin, end) for at most 1 MiB at a time, in order, also of a DTensor. `rank`: the rank
        that makes these calls; -1: all do. `state`: as of Engine.gather()."""
        failures: list[BaseException] = []

        def sink(user, parameter, begin, end, values) -> int:
            try:
                piece(values, begin, end)
            except BaseException as error:
                failures.append(error)
                return 1
            return 0

        code = library.ebb_gather_state(self.memory.handle, self.ids[name], *_state_of(state), rank, _library.SINK(sink), None)
        if failures:
            raise failures[0]
        check(code)

    def slices_of_masters(self, groups: Iterable[Iterable[str]]) -> list[torch.Tensor]:
        """As Engine.slices_of_masters()."""
        self.between_forwards(checks_writes=False)
        found = {number: bytearray() for number in self.ids.values()}

        def take(user, parameter, begin, end, numbers) -> int:
            found[parameter] += ctypes.string_at(numbers, 4 * (end - begin))
            return 0

        check(library.ebb_read(self.memory.handle, MASTER, None, _library.SINK(take), None))
        flat = [bytearray().join(found[self.ids[name]] for name in names) for names in groups]
        made = [torch.frombuffer(one, dtype=torch.float32) if one else torch.empty(0) for one in flat]
        for one in made:
            one.__class__ = guarded(torch.Tensor, Copied)
        return made

    def lend(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Collective: Engine.lend()."""
        before: dict[str, torch.Tensor] = {}
        names = list(names)
        self._show_whole()  # what is read later would take the place of values that are lent
        for name in names:
            slots, i = self.slots[name]
            if i in slots.lent:
                raise RuntimeError(f"'{name}' is gathered already: contexts over one parameter cannot be nested")
        for name in names:
            slots, i = self.slots[name]
            value = self.gather(name).to(slots.hidden[i].device)
            before[name] = value.clone()
            slots.lend(i, value)
        return before

    def take_back(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: slots.take_back(i) for name in names for slots, i in (self.slots[name],)}

    def whole_values(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Collective, of close(keep_values=True): of a parameter that is cut, this rank's block."""
        self.between_steps("close(keep_values=True)")
        if self.is_suspended:
            raise Error("close(keep_values=True) while the engine is suspended: call resume() first")
        failure: Error | None = None
        values: dict[str, torch.Tensor] = {}
        try:
            for name, parameter in self.parameters.items():
                values[name] = torch.empty(local_of(parameter).shape, dtype=parameter.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            failure = Error(
                f"close(keep_values=True): the model does not fit into memory: {error}. The engine is still open: save with save_pretrained() or save(), "
                "then close()", "RESOURCE_EXHAUSTED"
            )
        try:
            self.agree(failure, failure)
        except Error as error:
            error.code = "RESOURCE_EXHAUSTED" if "does not fit into memory" in str(error) else error.code
            raise
        for name, value in values.items():
            block = block_of(name, self.parameters[name])

            def take(numbers: Any, begin: int, end: int, into: torch.Tensor = value, block: Block | None = block) -> None:
                piece = torch.frombuffer((ctypes.c_float * (end - begin)).from_address(ctypes.addressof(numbers.contents)), dtype=torch.float32)
                into.view(-1)[begin:end].copy_(piece) if block is None else block.take(into, piece, begin)

            self.gather_pieces(name, take, rank=-1)
        return values

    def _end_backwards(self) -> None:
        """Collective: makes the gradients of the open step final."""
        steps = self.steps
        if steps.in_step and steps.is_reduced:
            return
        if not steps.in_step or steps.backwards == 0 or self.walk.in_round:
            raise Error("a gradient has no value here: read and write gradients between the last backward of a step and step()")
        if not steps.held:
            raise Error("gradients are read and written in steps that keep them: set engine.reads_gradients = True before the step begins")
        if not steps.is_open and steps.backwards < steps.accumulation:
            raise Error(
                f"a gradient is read or written after {steps.backwards} of {steps.accumulation} backwards of the step: do that after the last one"
            )
        self.walk.check_whole()
        self.walk.finish_round()
        steps.check_gradients(has_new=steps.backwards > steps.counted)
        steps.counted = steps.backwards
        steps.reduce()

    def check_can_write(self) -> None:
        if self.steps.in_step:
            raise Error("parameters can be written only between steps: after step() or drop()")

    def write(self, values: Mapping[str, torch.Tensor], state: str = "") -> None:
        """Collective: sets fp32 masters, or another state, as of Engine.gather()."""
        if state == GRADIENT_NAME:
            self._end_backwards()
        else:
            self.check_can_write()
        for name, value in values.items():
            shape = self.parameters[name].shape
            if value.shape != shape:
                raise Error(f"'{name}' has the shape {list(shape)}, and was given {list(value.shape)}", "INVALID_ARGUMENT")
        if not state:
            self.steps.whole.hide()
        for name, value in values.items():
            given = value.detach().to("cpu", torch.float32).contiguous()
            if state == GRADIENT_NAME and (scale := self.steps.scale_of_sums()) != 1:
                given = given / scale

            def fill(user, parameter, begin, end, numbers, address: int = given.data_ptr()) -> int:
                ctypes.memmove(numbers, address + 4 * begin, 4 * (end - begin))
                return 0

            check(library.ebb_write_parameter(self.memory.handle, self.ids[name], *_state_of(state), _library.FILL(fill), None))
        if not state:
            self.steps.refresh()


def _state_of(name: str) -> tuple[int, bytes | None]:
    """For the library: a class, and of an optimizer's the name."""
    return (MASTER, None) if not name else (GRADIENT, None) if name == GRADIENT_NAME else (OPTIMIZER, name.encode())
