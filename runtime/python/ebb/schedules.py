"""DeepSpeed's five schedules: rates as functions of the number of applied steps, which are written into the groups of an optimizer.

`last_batch_iteration` is -1 before the first step(), and is all that state_dict() has."""

from __future__ import annotations

import logging
import math
from typing import Any, Sequence

import torch

log = logging.getLogger("ebb")
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _Schedule:
    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int):
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # of a wrapper
        self.last_batch_iteration = last_batch_iteration

    def _for_each_group(self, value: Any, name: str) -> list[float]:
        groups = self.optimizer.param_groups
        if not isinstance(value, (list, tuple)):
            return [value] * len(groups)
        if len(value) != len(groups):
            raise ValueError(f"{name} has {len(value)} values, and the optimizer has {len(groups)} groups")
        return list(value)

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float]:
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_batch_iteration = state_dict["last_batch_iteration"]


class LRRangeTest(_Schedule):
    """min * (1 + rate * intervals), continuous or in stairs."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, lr_range_test_min_lr: Any = 1e-3, lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0, lr_range_test_staircase: bool = False, last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._for_each_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        if not _is_count(lr_range_test_step_size):
            raise ValueError(f"lr_range_test_step_size must be a positive integer, and is {lr_range_test_step_size}")
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [rate * factor for rate in self.min_lr]


class OneCycle(_Schedule):
    """From the lowest rate to the highest and back, then a decay. The first of the betas goes the other way."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: Any, cycle_max_lr: Any, decay_lr_rate: float = 0.0, cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None, cycle_first_stair_count: int = 0, cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0, cycle_momentum: bool = True, cycle_min_mom: Any = 0.8, cycle_max_mom: Any = 0.9, decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        rise = float(cycle_first_step_size)
        fall = rise if cycle_second_step_size is None else float(cycle_second_step_size)
        if rise <= 0:
            raise ValueError(f"cycle_first_step_size must be positive, and is {rise}")
        if fall < 0:
            raise ValueError(f"cycle_second_step_size must not be negative, and is {fall}")
        self.rise, self.total_size = rise, rise + fall
        self.stairs = cycle_first_stair_count, cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size = decay_step_size
        self.min_lrs = self._for_each_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._for_each_group(cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and "betas" not in self.optimizer.defaults:
            log.warning("OneCycle: cycle_momentum does nothing, because %s has no betas", type(self.optimizer).__name__)
            self.cycle_momentum = False
        if self.cycle_momentum:
            self.min_moms = self._for_each_group(cycle_min_mom, "cycle_min_mom")
            self.max_moms = self._for_each_group(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            if self.cycle_momentum:
                self._set_momenta(self.min_moms)

    def _scale(self) -> float:
        """How far the cycle is from its ends, from 0 to 1."""
        steps = self.last_batch_iteration + 1
        part, turn = 1.0 + steps / self.total_size - math.floor(1 + steps / self.total_size), self.rise / self.total_size
        rises = part <= turn
        stairs = self.stairs[0 if rises else 1]
        if stairs <= 0:
            return part / turn if rises else (part - 1) / (turn - 1)
        within = steps % self.total_size  # from whole steps, because a rounded part can be below its stair
        if within <= self.rise:
            return math.floor(within * stairs / self.rise) / stairs
        return math.floor((self.total_size - within) * stairs / (self.total_size - self.rise)) / stairs

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0 or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * ((self.last_batch_iteration - self.total_size + 1) / self.decay_step_size)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [low + (high - low) * scale for low, high in zip(self.min_lrs, self.max_lrs)]
        return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            return [(high - (high - low) * scale, 0.99) for low, high in zip(self.min_moms, self.max_moms)]
        return [(high * self._decay(self.decay_mom_rate), 0.99) for high in self.max_moms]

    def _set_momenta(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta):
            group["betas"] = (momentum, 0.99)

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        if self.cycle_momentum:
            self._set_momenta([first for first, _ in self.get_mom() or ()])


class WarmupLR(_Schedule):
    """From min to max by the logarithm or in a line, then max. `warmup_max_lr` None: each group's own rate."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, warmup_min_lr: Any = 0.0, warmup_max_lr: Any = None, warmup_num_steps: int = 1000,
        warmup_type: str = "log", last_batch_iteration: int = -1,
    ):
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.min_lrs = self._for_each_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._for_each_group(warmup_max_lr, "warmup_max_lr")
        self._set_warmup(warmup_num_steps, warmup_type)
        if last_batch_iteration == -1:
            self._set(self.min_lrs)

    def _set_warmup(self, steps: int, kind: str) -> None:
        if isinstance(steps, int) and steps == 0:
            steps = 2  # as before DeepSpeed 0.19.6: programs still write 0
        if not _is_count(steps):
            raise ValueError(f"warmup_num_steps must be a positive integer, and is {steps}")
        self.warmup_num_steps = max(2, steps)
        if kind not in ("log", "linear"):
            log.warning("warmup_type '%s' is not known: the rate rises by the logarithm", kind)
            kind = "log"
        self.warmup_type = kind

    def _warmed(self) -> float:
        if self.warmup_type == "linear":
            return self.last_batch_iteration / self.warmup_num_steps
        return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last_batch_iteration + 1)

    def _part(self) -> float:
        return self._warmed() if self.last_batch_iteration < self.warmup_num_steps else 1.0

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        part = self._part()
        return [low + (high - low) * part for low, high in zip(self.min_lrs, self.max_lrs)]


class WarmupDecayLR(WarmupLR):
    """Then a line from max towards 0 of the way to min, at `total_num_steps`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_lr: Any = 0.0, warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000, warmup_type: str = "log", last_batch_iteration: int = -1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        if total_num_steps < self.warmup_num_steps:
            log.warning("total_num_steps %s is less than warmup_num_steps %s", total_num_steps, self.warmup_num_steps)

    def _part(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self._warmed()
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(WarmupLR):
    """Times each group's own rate: from `warmup_min_ratio` to 1, then a half cosine to `cos_min_ratio`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_num_steps: int, warmup_min_ratio: float = 0.0, warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001, warmup_type: str = "log", last_batch_iteration: int = -1,
    ):
        _Schedule.__init__(self, optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._set_warmup(warmup_num_steps, warmup_type)
        if total_num_steps < self.warmup_num_steps:
            log.warning("total_num_steps %s is less than warmup_num_steps %s", total_num_steps, self.warmup_num_steps)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr_ratio(self) -> float:
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._warmed() * (1.0 - self.warmup_min_ratio)
        done = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * done)) / 2))

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


def of_config(kind: str, parameters: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that the JSON names: one of these five, or one of torch's."""
    made = globals().get(kind) if kind in VALID_LR_SCHEDULES else getattr(torch.optim.lr_scheduler, kind, None)
    if made is None:
        raise ValueError(f"scheduler.type '{kind}' is no schedule of DeepSpeed's or torch's: {', '.join(VALID_LR_SCHEDULES)}, or a class of "
                         "torch.optim.lr_scheduler")
    return made(optimizer, **{key: value for key, value in parameters.items() if value != "auto"})
