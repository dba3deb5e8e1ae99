"""Steps that the loop drops, or that have any number of backwards, and what a loop may read between backwards and steps."""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch

from ._library import Error, Rates
from ._state import State
from ._steps import Steps
from ._walk import Walk

_ANY = 2**31 - 1


class OpenSteps:
    """Is a part of Engine."""

    accumulation: int
    config: dict[str, Any]
    _state: State
    _steps: Steps
    _walk: Walk

    def drop(self) -> None:
        """Drops the open step and its gradients. Call it after an exception, to go on with the next step. With tensor ranks, an exception that this
        call handles ends the step on every rank, with an error that has its text; if it is of this rank alone, the run ends with it."""
        self._state.check()
        error = sys.exc_info()[1]
        if self._steps.faults is not None and error is not None and self._steps.in_step:
            self._walk.fail(error)
        self._walk.forget()
        self._steps.drop()
        if self._steps.faults is not None:
            self._steps.faults.check()

    def open_steps(
        self, backwards: int, rates: Callable[[], Rates] | None = None, sums_ranks: bool = False, scale: Callable[[], float] | None = None
    ) -> None:
        """From the next step on, a step has any number of backwards, and step(now=True) ends it. Gradients and report().loss are sums over the
        backwards, and means over ranks; with `sums_ranks` they are sums over ranks, too. The JSON must have a "gradient_accumulation_steps" of
        at least 2.

        backwards: of a usual step. A step is planned for as many as the largest of the last 8 had. If it has more, this rank's gradients so far
        go to the CPU's memory until it ends, and it is planned again for twice as many.
        rates: is called when a step begins and when it ends, for the name, the learning rate and the weight decay of each group. None as a
        value: the JSON's. Default: those of param_groups.
        scale: is called when gradients are read or written and when a step ends, for a factor of their sums. Default: 1."""
        self._state.between_steps("open_steps")
        steps = self._steps
        self.accumulation = steps.accumulation = _ANY
        steps.is_open = True
        steps.counts.append(backwards)
        steps.sums, steps.sums_ranks = True, sums_ranks
        steps.scale_of_sums = scale or steps.scale_of_sums
        if rates is not None:
            steps.rates, steps.takes_late_rates = rates, True

    @property
    def backwards(self) -> int:
        """Of the open step. After an exception in it: those before the exception, until drop()."""
        return self._steps.backwards

    @property
    def is_between_forward_and_backward(self) -> bool:
        return self._walk.in_round

    @property
    def failure(self) -> str:
        """The exception that has ended the last forward or backward, for which drop() has not been called; "": none."""
        return self._walk.failure or ("a backward that did not end" if self._walk.backward is not None else "")

    def clear_gradients(self) -> None:
        """Removes `.grad` of the parameters. The gradients that the engine has taken stay."""
        self._state.check()
        self._steps.clear_gradients()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for loss.backward()."""
        self._state.check()
        self._steps.is_scaled = True
        return loss.float() * self._steps.loss_scale() if self._steps.is_half else loss

    def next_loss_scale(self) -> float:
        """Collective, between steps: the loss scale of the next step, after the verdict on the last one. Without fp16: 1."""
        self._state.between_steps("next_loss_scale")
        return self._steps.next_loss_scale() if self._steps.is_half else 1.0

    def forget(self) -> None:
        """Drops the forwards since the last backward, which get none. The gradients of earlier backwards of the step stay."""
        self._state.check()
        if not self._steps.in_step or self.backwards == 0:
            self.drop()
            return
        self._walk.check_whole()
        self._walk.settle()
        self._walk.forget_round()

    @property
    def is_paused(self) -> bool:
        """Whether forwards pass the engine by, and read what parameters show, as between lend() and take_back(): generation with whole values."""
        return self._walk.is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._state.between_forwards(checks_writes=False)
        self._walk.is_paused = is_paused

    @property
    def shows_values(self) -> bool:
        """Whether parameters that are whole on every rank show their values between steps too, without a copy and on each rank alone: all at
        stages 0 to 2, and at stage 3 those of units of at most "stage3_param_persistence_threshold" elements. The first read after a step
        waits for its updates."""
        return self._steps.whole.enabled

    @shows_values.setter
    def shows_values(self, shows: bool) -> None:
        self._state.between_steps("shows_values")
        self._steps.whole.hide()
        self._steps.whole.enabled = shows

    @property
    def reads_gradients(self) -> bool:
        """Whether gradients can be gathered and written between the last backward of a step and step(). No parameter is then updated before
        step(). A change holds from the next step on."""
        return self._steps.holds

    @reads_gradients.setter
    def reads_gradients(self, reads: bool) -> None:
        self._steps.holds = reads
