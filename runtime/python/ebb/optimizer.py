"""The engine's optimizer as torch's schedulers need it: groups with a learning rate and a weight decay."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import traceback
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn

from ._library import Error

log = logging.getLogger("ebb")
_MOMENTA = ("betas", "momentum")
_GIVEN = ("lr", "weight_decay")
_FIXED = {*_MOMENTA, "eps", "amsgrad", "maximize", "nesterov", "dampening", "alpha", "centered", "rho", "decoupled_weight_decay"}
_TWO_SCHEDULES = "two schedules: the JSON has a \"scheduler\", which sets the rate of each step. Remove it there to use a scheduler of torch"


class _Group(dict):
    """A group as torch's optimizers have them. If the JSON has a schedule, "lr" is what that gives the next step, until "lr" is set."""

    def __init__(self, values: dict[str, Any], scheduled: Callable[[str], float | None] | None):
        super().__init__(values)
        self._scheduled = scheduled
        self.of_json = {key: values[key] for key in _GIVEN}
        self.given: set[str] = set()  # of these, those that were set
        self.replaces_schedule: Callable[[], None] = lambda: None  # is called when "lr" is set beside the JSON's schedule

    def __getitem__(self, key: str) -> Any:
        if key == "lr" and self._scheduled is not None:
            self._refuse_scheduler()
            if "lr" not in self.given and (rate := self._scheduled(self["group"])) is not None:
                super().__setitem__("lr", rate)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr" and self._scheduled is not None:
            self._refuse_scheduler()
        if key in _FIXED and (key not in self or super().__getitem__(key) != value):
            if self._scheduled is not None:
                self._refuse_scheduler()
            raise Error(
                f"param_groups[i][{key!r}] = {value}: the engine keeps the configuration's, and takes \"lr\" and \"weight_decay\" alone. Set it in the "
                "JSON, and give schedulers of torch that change the momentum cycle_momentum=False", "UNIMPLEMENTED"
            )
        super().__setitem__(key, value)
        if key in _GIVEN:
            self._give({key})

    def update(self, *values: Any, **more: Any) -> None:
        for key, value in dict(*values, **more).items():
            self[key] = value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key == "initial_lr" and self._scheduled is not None:  # of the schedulers of timm, too
            raise Error(_TWO_SCHEDULES)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:  # dict(group) then takes its items by __getitem__
        return super().__iter__()

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def load(self, values: dict[str, Any], given: Iterable[str]) -> None:
        super().update({key: value for key, value in values.items() if key != "params"})
        differs = {key for key in _GIVEN if values.get(key) != self.of_json[key] and (key != "lr" or self._scheduled is None)}
        self.given = set()
        self._give(differs.union(given))

    def _give(self, keys: set[str]) -> None:
        if "lr" in keys - self.given and self._scheduled is not None:
            self.replaces_schedule()
        self.given |= keys

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _refuse_scheduler(self) -> None:
        for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 4):
            if isinstance(frame.f_locals.get("self"), torch.optim.lr_scheduler.LRScheduler):
                raise Error(_TWO_SCHEDULES)


class Optimizer(torch.optim.Optimizer):
    """`param_groups[i]["lr"]` is the rate of the next step. If you set it, or `["weight_decay"]`, that value holds from the next step on.
    Until then the JSON's hold. The engine has the optimizer states.

    scheduled: the rate that the JSON's schedule gives a group's next step; None: the JSON has no schedule. schedule: its type."""

    of_engine = True  # its step() is the engine's

    def __init__(
        self, groups: list[dict[str, Any]], step: Callable[[], bool], zero_grad: Callable[[], None],
        scheduled: Callable[[str], float | None] | None = None, schedule: str = "",
    ):
        # Some schedulers ask the defaults for the name of the momentum, others divide by the rate in them.
        defaults = {name: groups[0][name] for name in ("lr", "weight_decay", *_MOMENTA) if name in groups[0]}
        super().__init__([_Group(group, scheduled) for group in groups], defaults)
        self._step = step
        self._zero_grad = zero_grad
        self._is_made = True
        self._schedule = schedule
        for group in self.param_groups:
            group.replaces_schedule = functools.partial(self._say_replaced, group["group"])

    def step(self, closure: None = None) -> bool:  # type: ignore[override]
        if closure is not None:
            raise Error("step(closure) is not supported", "UNIMPLEMENTED")
        return self._step()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler.step() asks for it, and would find no gradients."""
        raise Error(
            "GradScaler.step(): the engine has the gradients, and with \"fp16\" in the configuration it scales the loss itself: call "
            "engine.backward(loss) and engine.step(), without a GradScaler, or make it with enabled=False", "UNIMPLEMENTED"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_is_made"):  # else it is torch's own call, for a group of the engine's
            raise Error("add_param_group(): the engine's parameters are those of ebb.initialize, in the groups of groups=", "UNIMPLEMENTED")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Engine.zero_grad()."""
        self._zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "given": [sorted(group.given) for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("state"):
            raise Error(
                "load_state_dict() of another optimizer's states: the engine has the states, and takes them from engine.load(folder); without "
                '"state" the rates are taken', "UNIMPLEMENTED"
            )
        groups = self.param_groups
        super().load_state_dict(state_dict)  # makes other groups
        loaded, self.param_groups = self.param_groups, groups
        given = state_dict.get("given", [()] * len(groups))
        for group, values, of_group in zip(groups, loaded, given):
            group.load(values, of_group)

    def _say_replaced(self, group: str) -> None:
        for one in self.param_groups:  # logged once
            one.replaces_schedule = lambda: None
        log.warning(
            "param_groups[%d][\"lr\"] was set, and that rate holds from the next step on, instead of the schedule %s of the JSON's \"scheduler\". "
            "Remove \"scheduler\" from the JSON if the loop sets the rates", [one["group"] for one in self.param_groups].index(group), self._schedule
        )

    def rates(self) -> list[tuple[str, float | None, float | None]]:
        """What was set: of each group the rate and the weight decay; None: the JSON's."""
        return [
            (group["group"], *(float(group[key]) if key in group.given else None for key in _GIVEN)) for group in self.param_groups if group.given
        ]


def groups_of(parameters: list[tuple[str, nn.Parameter]], group_of: Callable[[str], str], config: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of Optimizer, by the resolved configuration."""
    top = config.get("optimizer", {}).get("params", {})
    stated = config.get("ebb", {}).get("parameter_groups", {})
    kind_of_all = config.get("optimizer", {}).get("type", "")
    members: dict[str, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        members.setdefault(group_of(name), []).append(parameter)
    groups = []
    for group, of in members.items():
        options = stated.get(group, {})
        own = options.get("optimizer", {}).get("params", top)
        kind = options.get("optimizer", {}).get("type", kind_of_all).lower()
        groups.append({
            "params": of, "group": group,
            "lr": own.get("lr", 1e-3) * options.get("lr_factor", 1.0),
            "weight_decay": options.get("weight_decay", own.get("weight_decay", 0.0)),
            **({"momentum": own.get("momentum", 0.0)} if kind == "sgd" else {"betas": tuple(own.get("betas", (0.9, 0.999)))}),
        })
    return groups


def _name_in(parameters: Iterable[torch.Tensor]) -> str | None:
    """The engine's name of the first parameter that an engine has."""
    return next((name for parameter in parameters if (name := getattr(parameter, "_ebb_name", None)) is not None), None)


def refuse_other_optimizers() -> None:
    """Makes step() of other optimizers over the engine's parameters raise, because they would train nothing."""

    def before_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if getattr(optimizer, "of_engine", False):
            return
        name = _name_in(parameter for group in optimizer.param_groups for parameter in group["params"])
        if name is not None:
            raise Error(
                f"{type(optimizer).__name__}.step(): the engine updates '{name}', with the optimizer of the configuration: call "
                "engine.step(), and give schedulers engine.optimizer"
            )

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(before_step)


def _refusing(clip: Callable[..., None], said: str, code: str) -> Callable[..., None]:
    """`clip`, but an error over the engine's parameters. `said`: with {} for the name of one."""

    @functools.wraps(clip)
    def refuse_or_clip(parameters: Any, *arguments: Any, **keywords: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        name = _name_in(parameters)
        if name is not None:
            raise Error(said.format(name), code)
        clip(parameters, *arguments, **keywords)

    return refuse_or_clip


def refuse_clipping() -> None:
    """Makes torch's clipping over the engine's parameters raise, because it finds no gradients and would clip nothing."""
    clipping = torch.nn.utils.clip_grad
    clipping.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = _refusing(
        clipping.clip_grad_value_, "clip_grad_value_(): the engine has the gradient of '{}', and clips by norm only (\"gradient_clipping\")",
        "UNIMPLEMENTED",
    )
    scale = getattr(clipping, "_clip_grads_with_norm_", None)  # clip_grad_norm_() calls it, under whatever name that was imported
    if scale is not None:
        clipping._clip_grads_with_norm_ = _refusing(
            scale, "clip_grad_norm_(): the engine has the gradient of '{}'. Set \"gradient_clipping\" in the configuration instead; "
            "engine.report().gradient_norm is the norm", "FAILED_PRECONDITION",
        )
