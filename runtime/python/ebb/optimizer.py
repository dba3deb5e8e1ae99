"""The engine's optimizer as torch's schedulers need it: groups with a learning rate and a weight decay."""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Iterable

import torch
from torch import nn

from ._library import Error

log = logging.getLogger("ebb")
_MOMENTA = ("betas", "momentum")


class Optimizer(torch.optim.Optimizer):
    """If you change `param_groups[i]["lr"]` or `["weight_decay"]`, the next step uses that value. Until then the JSON's values hold.
    The engine has the optimizer states."""

    def __init__(self, groups: list[dict[str, Any]], step: Callable[[], bool], zero_grad: Callable[[], None]):
        # Some schedulers ask the defaults for the name of the momentum, others divide by the rate in them.
        super().__init__(groups, {name: groups[0][name] for name in ("lr", "weight_decay", *_MOMENTA) if name in groups[0]})
        self._step = step
        self._zero_grad = zero_grad
        self._of_json = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        self._momenta = [_momentum(group) for group in self.param_groups]
        self._is_driven = False

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
        if hasattr(self, "_of_json"):  # else it is torch's own call, for a group of the engine's
            raise Error("add_param_group(): the engine's parameters are those of ebb.initialize, in the groups of groups=", "UNIMPLEMENTED")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Engine.zero_grad()."""
        self._zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_driven": self._is_driven}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        values = dict(state_dict)
        self._is_driven = values.pop("is_driven", False)
        super().load_state_dict(values)

    def rates(self) -> list[tuple[str, float, float | None]]:
        if self._momenta and [_momentum(group) for group in self.param_groups] != self._momenta:
            log.warning("the momentum stays that of the configuration: give the scheduler cycle_momentum=False")
            self._momenta = []  # logged once
        now = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        if not self._is_driven and now == self._of_json:
            return []
        self._is_driven = True
        return [
            (group["group"], float(lr), float(decay) if decay != was else None)
            for group, (lr, decay), (_, was) in zip(self.param_groups, now, self._of_json)
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


def _momentum(group: dict[str, Any]) -> list[Any]:
    return [group.get(name) for name in _MOMENTA]


def _name_in(parameters: Iterable[torch.Tensor]) -> str | None:
    """The engine's name of the first parameter that an engine has."""
    return next((name for parameter in parameters if (name := getattr(parameter, "_ebb_name", None)) is not None), None)


def refuse_other_optimizers() -> None:
    """Makes step() of other optimizers over the engine's parameters raise, because they would train nothing."""

    def before_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        if isinstance(optimizer, Optimizer):
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
        clipping.clip_grad_value_,
        "clip_grad_value_(): the engine has the gradient of '{}', and clips by norm only (\"gradient_clipping\")",
        "UNIMPLEMENTED",
    )
    scale = getattr(clipping, "_clip_grads_with_norm_", None)  # clip_grad_norm_() calls it, under whatever name that was imported
    if scale is not None:
        clipping._clip_grads_with_norm_ = _refusing(
            scale,
            "clip_grad_norm_(): the engine has the gradient of '{}'. Set \"gradient_clipping\" in the configuration instead; "
            "engine.report().gradient_norm is the norm",
            "FAILED_PRECONDITION",
        )
