"""Steps, evaluations and scopes of one engine, which a walk through its model opens and closes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
from collections import deque
from ctypes import byref, c_double, c_float, c_int32, c_int64
from typing import Callable, Iterator, Sequence

import torch

from . import _library
from ._blocks import local_of, own_gradient, whole_of
from ._hidden import as_plain
from ._library import BACKWARD, FORWARD, GRADIENT, SHOW, Error, Rates, check, library
from ._tensor_faults import TensorFaults
from ._tensors import DTYPES, Memory, Slots, over
from ._units import Unit
from ._visits import Order, Visit
from ._whole_values import WholeValues

_FP16_SCALE_MAX = 2.0**15
_COUNTS, _ROUNDS_MORE = 8, 8  # steps whose backwards say those of the next one; rounds of a step that has more
LARGE_GRADIENT = 1 << 20  # bytes of a gradient that goes to the engine as it comes; smaller ones are worth no call of their own
_STRIDED = {torch.strided}
_UNSCALED = "with fp16 the loss has to be scaled: engine.backward(loss) instead of loss.backward()"
_OTHER_ORDER = (
    ". This batch uses the unit in another order than the example: name the unit's parameters in resident=, or call engine.reorder(example) "
    "before such a batch"
)
_layout_of = operator.attrgetter("layout")


class _Asked:
    """The gradients of a unit that one call asks for, and tensors over the memory that the engine gives for them."""

    def __init__(self, first_id: int, ready: tuple[int, ...]):
        self.ids = (c_int32 * len(ready))(*[first_id + i for i in ready])
        self.views = (_library.Gradient * len(ready))()
        self.tensors: dict[bytes, list[torch.Tensor]] = {}  # by the bytes of views
        self.added: dict[bytes, list[int]] = {}  # and of them, those that gradients are added to; the others are written


class Steps:
    def __init__(self, memory: Memory, units: list[Unit], slots: list[Slots], first_id: list[int], order: Order,
                 device: torch.device, is_half: bool, rates: Callable[[], Rates], accumulation: int, ranks: int, data_ranks: int,
                 faults: TensorFaults | None):
        self.memory = memory
        self.units = units
        self.slots = slots
        self.whole = WholeValues(memory, units, slots)
        self.first_id = first_id  # by unit: the engine's number of its first parameter
        self.taking = order.taking_visits(len(units))  # by unit: which visit of a round takes gradients
        self.device = device
        self.is_half = is_half
        self.rates = rates
        self.accumulation = accumulation
        self.ranks, self.data_ranks = ranks, data_ranks
        self.faults, self.opened = faults, 0  # scopes, of the engine's life
        self.in_step = False
        self.has_failed = False  # the step that the model's last call belongs to
        self.backwards = 0  # that have ended in the step
        self.counted = 0  # of them, those that step() has seen
        self.in_evaluation = False
        self.walked: list[int] = []  # the units of the evaluation, as they came
        self.is_scaled = False  # engine.backward() has multiplied the loss
        self.sums = False  # over micro-batches, instead of their mean
        self.begun_with_sums = False
        self.is_open = False  # a step has any number of backwards
        self.counts: deque[int] = deque(maxlen=_COUNTS)  # of backwards, of the last open steps
        self.rounds = 0  # that the step was begun with; 0: the configuration's accumulation
        self.losses: list[torch.Tensor] = []  # of the open step
        self.aside: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by parameter: where a slice of its gradient begins, and the slice
        self.sums_ranks = False  # with sums: over ranks, too
        self.scale_of_sums: Callable[[], float] = lambda: 1.0  # of the gradients of the open step
        self.takes_late_rates = False  # those that rates() gives when the step ends
        self.holds = False  # steps keep their gradients until their end, so that they can be read and written; of the open step: held
        self.held = False
        self.is_reduced = False  # the gradients of the step are final
        self.given: Rates = []
        self.taken: set[str] = set()  # names of the parameters whose gradients the engine has taken in the step
        self._scope = c_int64()
        self._taken: tuple[int, int] | None = None  # a unit, and the open backward scope that takes its gradients
        self.handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._accumulated, unit, i))
            for unit in units if not unit.keep_whole
            for i, parameter in enumerate(unit.parameters) if parameter.requires_grad and parameter.numel() * parameter.itemsize >= LARGE_GRADIENT
        ]
        if is_half:  # a backward that reaches no unit is not seen otherwise
            self.handles += [
                parameter.register_post_accumulate_grad_hook(self._refuse_unscaled)
                for unit in self.whole.residents for parameter in unit.parameters if parameter.requires_grad
            ]
        self._asked: dict[tuple[int, tuple[int, ...]], _Asked] = {}

    # Of _visits.Scopes.

    def begin(self, trains: bool) -> None:
        self.memory.check_process()
        if self.memory.changed:
            raise Error(f"the trainer's own code has changed values of '{self.memory.changed}' in place, perhaps on this rank alone: make a new engine")
        if not self.slots[0].views:
            raise Error("a forward of the model while the engine is suspended: call resume() first")
        if self.faults is not None and not (self.in_step if trains else self.in_evaluation):
            self.faults.check()
        if trains:
            self.finish_evaluation()
            if not self.in_step:
                self.whole.hide()
                self._begin_step()
            elif self.is_reduced:
                raise Error(
                    "a forward with gradients after a gradient of the step was read or written, which ends its backwards: read and write gradients "
                    "after the last backward of a step"
                )
            elif self.is_open and self.backwards >= self.rounds:
                self._go_on_with_more_rounds()
            elif self.backwards >= self.accumulation:
                raise Error(
                    f"a forward with gradients after {self.backwards} backward(s) of one step, but gradient_accumulation_steps is "
                    f"{self.accumulation}. Call step() after each backward, and set gradient_accumulation_steps to the number of backwards in a "
                    "step. If another model's loss has left gradients here, drop them with zero_grad() or drop()"
                )
        elif not self.in_evaluation:
            self._begin_evaluation()
            if not self.in_step:  # what runs may read residents, and parameters of other units
                self.whole.show_residents()
                self.whole.show()

    def open(self, kind: int, visit: Visit) -> int:
        index = visit.unit.index
        self.slots[index].check()
        self.opened += 1
        self.walked.append(index) if self.in_evaluation else None
        if kind == SHOW:  # in an evaluation within the step, because the step's order has no such scopes
            kind = FORWARD
            if not self.in_evaluation:
                self._begin_evaluation()
        elif kind == BACKWARD:
            self.finish_evaluation()
        code = library.ebb_scope_open(self.memory.handle, kind, index, byref(self._scope))
        if code:
            self._fail(visit.unit, code)
        self.slots[index].show()
        scope = self._scope.value
        if kind == BACKWARD and self._takes(visit):
            self._taken = index, scope
        return scope

    def close(self, kind: int, visit: Visit, scope: int) -> None:
        index = visit.unit.index
        if kind == BACKWARD and self._takes(visit):
            self._taken = None
            self._take_gradients(visit.unit, scope, range(len(visit.unit.parameters)))
        slots = self.slots[index]
        try:
            if not slots.keep_whole:  # hide() would undo a write to `.data` unseen
                slots.check()
        finally:
            slots.hide()
            check(library.ebb_scope_close(self.memory.handle, scope))

    def backward_begins(self) -> None:
        self.finish_evaluation()
        if self.is_half and not self.is_scaled:
            raise Error(_UNSCALED)

    def backward_ends(self, is_one_left_out: bool) -> None:
        self.backwards += 1
        self.is_scaled = False
        left = next(self._gradients_left(), None)
        if left is not None:
            self.clear_gradients()
            if is_one_left_out:
                raise Error(
                    "a forward of the model had no backward, so the next one is not where the order has it. Call engine.drop() instead of a backward "
                    "that the loop leaves out, and call the model under torch.no_grad() if it needs none"
                )
            raise Error(
                f"the gradient of '{left[1]}' came outside of the backward of its unit '{left[0].name}': the parameter is used by the loss or "
                "a module that is not in the unit, or its unit was used more often than the order says. Name it in resident=, "
                "make those modules one unit (units=), or give initialize an example, which shows the order"
            )

    def leave_round(self) -> None:
        if self.in_step and self.backwards == 0:
            self.in_step = self.in_evaluation = False
            check(library.ebb_step_drop(self.memory.handle))

    # Steps.

    def finish(self, scale: float) -> None:
        self.finish_evaluation()
        if self.aside and not self.is_reduced:
            self.reduce()
        self.counts.append(self.backwards)
        rates = self.rates()
        changed = rates if rates != self.given else []
        options = _library.FinishOptions(gradient_scale=scale, groups=_library.group_options(changed), group_count=len(changed))
        self.in_step = False
        self.backwards = self.counted = 0
        self.taken.clear()
        self.whole.age()
        check(library.ebb_step_finish(self.memory.handle, byref(options)))

    def reduce(self) -> None:
        check(library.ebb_step_reduce(self.memory.handle))
        self.is_reduced = True
        if self.aside:
            self._set_aside()
            aside, self.aside = self.aside, {}

            def fill(user, parameter, begin, end, numbers) -> int:
                done = 0
                for first, values in aside.get(parameter, ()):
                    low, high = max(first, begin), min(first + len(values), end)
                    if low < high:
                        ctypes.memmove(ctypes.addressof(numbers.contents) + 4 * (low - begin), values[low - first :].data_ptr(), 4 * (high - low))
                        done += high - low
                return 0 if done == end - begin else 1

            check(library.ebb_write(self.memory.handle, GRADIENT, None, _library.FILL(fill), None))

    def _set_aside(self) -> None:
        """Adds this rank's slices of the final gradients to those that are aside."""
        before, self.aside = self.aside, {}

        def take(user, parameter, begin, end, numbers) -> int:
            values = torch.frombuffer(bytearray(ctypes.string_at(numbers, 4 * (end - begin))), dtype=torch.float32)
            values += next((one for first, one in before.get(parameter, ()) if first == begin), 0.0)
            self.aside.setdefault(parameter, []).append((begin, values))
            return 0

        check(library.ebb_read(self.memory.handle, GRADIENT, None, _library.SINK(take), None))

    def _go_on_with_more_rounds(self) -> None:
        """Of an open step that has more backwards than the steps before. A plan with many rounds would make every step longer, so this step is
        begun again with more, and its gradients so far are added when they are final."""
        backwards, counted, losses = self.backwards, self.counted, self.losses
        check(library.ebb_step_reduce(self.memory.handle))
        self._set_aside()
        check(library.ebb_step_drop(self.memory.handle))
        self._begin_step(max(_ROUNDS_MORE, 2 * backwards))
        self.backwards, self.counted = backwards, counted
        if losses:
            self.add_loss(torch.stack(losses).sum())

    def fail(self, error: str, begins: str = "", walk: Sequence[int] = ()) -> str:
        """Ends the evaluation and the step, with an error that the library has not seen, so that every rank gets it. `begins`: "step" or
        "evaluation", which the other ranks are in, so this rank begins it if it has not. `walk`: the units of a forward, in their order; the
        other ranks gather them all in the evaluation. Returns the words that the step ends with."""
        if self.faults is not None and not self.has_failed:
            error = self.faults.text_of(error, self.opened)
        with contextlib.suppress(Error):  # of an engine that has failed
            if begins == "evaluation" and not self.in_step and self.ranks > 1:
                if not self.in_evaluation:
                    self._begin_evaluation()
                for index in walk[max((walk.index(unit) + 1 for unit in self.walked if unit in walk), default=0) :]:
                    check(library.ebb_scope_open(self.memory.handle, FORWARD, index, byref(self._scope)))
                    check(library.ebb_scope_close(self.memory.handle, self._scope))
            if self.in_evaluation:
                self.in_evaluation = False
                library.ebb_engine_agree(self.memory.handle, error.encode())
            if begins == "step" and not self.in_step and not self.has_failed and self.ranks > 1:
                self._begin_step()
        if not self.in_step:
            return error
        self.has_failed = True
        self.in_step = False
        self._taken = None
        library.ebb_step_finish(self.memory.handle, byref(_library.FinishOptions(error=error.encode())))
        for slots in self.slots:
            slots.hide()
        self.clear_gradients()
        return error

    def drop(self) -> None:
        self.in_step = self.in_evaluation = self.is_scaled = False
        self.backwards = self.counted = 0
        self.aside = {}
        self._taken = None
        check(library.ebb_step_drop(self.memory.handle))
        for slots in self.slots:
            slots.hide()
        self.clear_gradients()

    def _begin_evaluation(self) -> None:
        self.walked = []
        check(library.ebb_evaluation_begin(self.memory.handle))
        self.in_evaluation = True

    def finish_evaluation(self) -> float:
        loss = c_double()
        if self.in_evaluation:
            self.in_evaluation = False
            check(library.ebb_evaluation_finish(self.memory.handle, byref(loss)))
        return loss.value

    def check_gradients(self, has_new: bool) -> None:
        """Raises if the trainer's own code has put a gradient where the engine no longer takes it. `has_new`: a backward has ended since the
        last step(), so the gradients of residents have just been taken."""
        if not has_new:
            late = next((name for unit in self.whole.residents for name, one in zip(unit.names, unit.parameters) if one.grad is not None), None)
            if late is not None:
                raise Error(
                    f"'{late}' has got a gradient after the step() that counted the last backward, so it cannot count in this step any more: do "
                    "that before that step(). zero_grad() removes the gradient"
                )
        left = next(self._gradients_left(), None)
        if left is not None:
            raise Error(
                f"'{left[1]}' has got a gradient after the backward of its unit '{left[0].name}', in which the engine takes it: by a backward of "
                "a penalty alone, or by `.grad = ...`. Do that before the backward of the loss, add the penalty to the loss, or name the "
                "parameter in resident=, so that its gradient may change until step(). zero_grad() and drop() remove the gradient"
            )

    def _gradients_left(self) -> Iterator[tuple[Unit, str, torch.Tensor]]:
        """Of parameters that are not resident."""
        for unit in self.units:
            if not unit.keep_whole:
                with as_plain():
                    gradients = [parameter.grad for parameter in unit.parameters]
                for name, parameter, gradient in zip(unit.names, unit.parameters, gradients):
                    if gradient is not None:
                        yield unit, name, parameter

    def _refuse_unscaled(self, parameter: torch.Tensor) -> None:
        if not self.is_scaled:
            raise Error(_UNSCALED)

    def check_writes(self) -> None:
        """Raises if the trainer's own code has written to a parameter."""
        for slots in self.slots:
            slots.check()

    def refresh(self) -> None:
        """Collective, between steps: every rank gets what was written, and parameters show it."""
        if (self.whole.residents or self.whole.enabled) and self.slots[0].views:
            self.whole.is_stale = True
            self.begin(trains=False)
            self.finish_evaluation()

    def loss_scale(self) -> float:
        scale = c_float()
        check(library.ebb_step_loss_scale(self.memory.handle, byref(scale), None))
        return scale.value

    def next_loss_scale(self) -> float:
        self._begin_step()
        try:
            return self.loss_scale()
        finally:
            self.in_step = False
            check(library.ebb_step_drop(self.memory.handle))

    def scaled_backward(self, loss: torch.Tensor) -> None:
        """Runs backward with the loss scale. The largest fp16 number is 65504, so the gradient of an fp16 loss is only a part of the scale. The
        rest is multiplied after the loss's own node, where a mean has divided by the number of elements."""
        scale = self.loss_scale() if self.is_half else 1.0
        self.is_scaled = True
        first = min(scale, _FP16_SCALE_MAX) if loss.dtype == torch.float16 else scale
        if (rest := scale / first) != 1.0:
            loss.grad_fn.register_hook(lambda gradients, _: tuple(None if one is None else one * rest for one in gradients))
        try:
            loss.backward(torch.full_like(loss, first))
        finally:
            self.is_scaled = False

    def add_loss(self, loss: torch.Tensor) -> None:
        value = whole_of(loss.detach()).float().contiguous()  # of another dtype it is a new tensor, which has to live as long as the call
        if self.is_open:
            self.losses.append(value)
        check(library.ebb_add_loss(self.memory.handle, value.data_ptr()))

    def clear_gradients(self) -> None:
        self.taken.clear()
        with as_plain():
            for unit in self.units:
                for parameter in unit.parameters:
                    parameter.grad = None

    def adopt(self, order: Order) -> None:
        self.taking = order.taking_visits(len(self.units))
        self.forget_addresses()

    def forget_addresses(self) -> None:
        self._asked.clear()

    def _begin_step(self, rounds: int = 0) -> None:
        self.given = self.rates()
        self.begun_with_sums = self.sums
        self.losses = []
        self.held = self.holds or self.is_open
        self.rounds = rounds or max(self.counts) if self.is_open else 0
        options = _library.StepOptions(
            may_leave_out=1, hold_updates=self.held, gradient_divisor=(1 if self.sums_ranks else self.data_ranks) if self.sums else 0, micro_batches=self.rounds,
            rates_at_finish=self.takes_late_rates, groups=_library.group_options(self.given), group_count=len(self.given)
        )
        check(library.ebb_step_begin(self.memory.handle, byref(options)))
        self.in_step, self.is_reduced = True, False
        self.whole.is_stale = False  # the forward that begins the step shows them
        self.backwards = self.counted = 0

    def _takes(self, visit: Visit) -> bool:
        return self.taking[visit.unit.index] == visit.number or visit.unit.keep_whole

    def _accumulated(self, unit: Unit, i: int, parameter: torch.Tensor) -> None:
        """Takes a large gradient as soon as torch has it, so that torch need not hold it until the unit's backward ends. If the trainer
        has a hook on the parameter too, the gradient is taken later, because that hook must find it."""
        if self._taken is not None and self._taken[0] == unit.index and len(parameter._post_accumulate_grad_hooks) == 1:
            self._take_gradients(unit, self._taken[1], (i,))

    def _take_gradients(self, unit: Unit, scope: int, of: Sequence[int]) -> None:
        gradients = [own_gradient(parameter) if i in of else None for i, parameter in enumerate(unit.parameters)]
        ready = tuple([i for i in of if gradients[i] is not None])
        if not ready:
            return
        asked = self._asked.get((unit.index, ready))
        if asked is None:
            frozen = next((i for i in ready if not unit.trainable[i]), None)
            if frozen is not None:
                raise Error(
                    f"'{unit.names[frozen]}' has a gradient, but was frozen at ebb.initialize, so it has no optimizer state: freeze parameters that "
                    "will be trained later after ebb.initialize, not before it"
                )
            asked = self._asked[unit.index, ready] = _Asked(self.first_id[unit.index], ready)
        code = library.ebb_scope_gradients(self.memory.handle, scope, asked.ids, len(ready), asked.views)
        if code:
            self._fail(unit, code, _OTHER_ORDER if _library.CODES[code] == "FAILED_PRECONDITION" else "")
        # The same addresses come again and again, as many as the engine has slots.
        memory = bytes(asked.views)
        into = asked.tensors.get(memory)
        if into is None:
            into = asked.tensors[memory] = [
                over(self.memory, view.data, local_of(unit.parameters[i]).shape, DTYPES[view.dtype], self.device) for i, view in zip(ready, asked.views)
            ]
            asked.added[memory] = [n for n, view in enumerate(asked.views) if not view.first]
        given = [gradients[i] for i in ready]
        if set(map(_layout_of, given)) != _STRIDED:
            given = [gradient if gradient.layout == torch.strided else gradient.to_dense() for gradient in given]
        added = asked.added[memory]
        # One call for all tensors of a unit takes half of the time of a call for each.
        if not added:
            torch._foreach_copy_(into, given)
        else:
            for n, (target, gradient) in enumerate(zip(into, given)):
                target.add_(gradient) if n in added else target.copy_(gradient)
        for i in ready:
            unit.parameters[i].grad = None
            if not unit.keep_whole:
                self.taken.add(unit.names[i])

    def _fail(self, unit: Unit, code: int, advice: str = "") -> None:
        """Raises the error of the step, which says more than the error of a scope."""
        text = _library.error_text()
        if self.faults is not None and not self.has_failed:
            self.faults.text_of(text, self.opened)
        self._taken = None
        self.has_failed = True
        if self.in_step:
            self.in_step = False
            if library.ebb_step_finish(self.memory.handle, None):
                text = _library.error_text()
            self.clear_gradients()
        raise Error(f"'{unit.name}': {text}{advice}", _library.CODES[code])
