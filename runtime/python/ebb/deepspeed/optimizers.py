"""From optimizers of torch and DeepSpeed to Ebb's rules, which update the shards. A group keeps its own dict: what is written into "lr" and
"weight_decay" of it holds from the next update on."""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import nn

from .._library import Error
from .._own_updates import OwnUpdates, members_of, trained

_LATER = ("lr", "weight_decay")  # may change between updates
_OF_EBB = ("states", "min_8bit_size")  # of the JSON: how states are kept


class _Rule(torch.optim.Optimizer):
    """An optimizer of DeepSpeed's: groups and their options, until initialize() takes them."""

    OPTIONS: dict[str, Any] = {}

    def __init__(self, model_params: Any, **options: Any):
        unknown = [name for name in options if name not in self.OPTIONS and name not in _IGNORED]
        if unknown:
            raise Error(f"{type(self).__name__} has no option {', '.join(unknown)}", "INVALID_ARGUMENT")
        if options.get("amsgrad"):
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant")
        if options.get("max_grad_norm"):
            raise ValueError(_CLIPPING)
        super().__init__(model_params, {**self.OPTIONS, **{key: value for key, value in options.items() if key not in _IGNORED}})

    def step(self, closure: Any = None) -> Any:
        raise Error(f"{type(self).__name__}.step() without an engine: give it to deepspeed.initialize, or use an optimizer of torch's", "UNIMPLEMENTED")


_IGNORED = ("amsgrad", "set_grad_none", "fp32_optimizer_states", "fused", "foreach", "max_grad_norm")
_CLIPPING = "'max_grad_norm' is not an option of an optimizer here: set 'gradient_clipping' in the configuration"


class FusedAdam(_Rule):
    OPTIONS = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "adam_w_mode": True, "weight_decay": 0.0}


class DeepSpeedCPUAdam(FusedAdam):
    def __init__(self, model_params: Any, *, adamw_mode: bool = True, **options: Any):
        super().__init__(model_params, **{"adam_w_mode": adamw_mode, **options})


class FusedLion(_Rule):
    OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}


DeepSpeedCPULion = type("DeepSpeedCPULion", (FusedLion,), {"__module__": __name__})


class DeepSpeedCPUAdagrad(_Rule):
    OPTIONS = {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}


class FusedLamb(_Rule):
    OPTIONS = {
        "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "eps_inside_sqrt": False, "weight_decay": 0.0, "max_coeff": 10.0,
        "min_coeff": 0.01,
    }


_ADAM = ("betas", "eps", "bias_correction", "adam_w_mode")
# Exactly these types, because a class that inherits from one has a step() of its own: Ebb's rule, and the options that it takes.
_RULES: dict[type, tuple[str, tuple[str, ...]]] = {
    torch.optim.AdamW: ("AdamW", ("betas", "eps")), torch.optim.Adam: ("Adam", ("betas", "eps")),
    torch.optim.SGD: ("SGD", ("momentum", "dampening", "nesterov")),
    torch.optim.Adagrad: ("Adagrad", ("lr_decay", "eps", "initial_accumulator_value")),
    torch.optim.RMSprop: ("RMSprop", ("momentum", "alpha", "eps", "centered")),
    FusedAdam: ("Adam", _ADAM), DeepSpeedCPUAdam: ("Adam", _ADAM), FusedLion: ("Lion", ("betas",)), DeepSpeedCPULion: ("Lion", ("betas",)),
    DeepSpeedCPUAdagrad: ("Adagrad", ("eps",)),
    FusedLamb: ("Lamb", ("betas", "eps", "bias_correction", "max_coeff", "min_coeff", "eps_inside_sqrt")),
}
_OF_JSON = {"adam": FusedAdam, "adamw": FusedAdam, "lion": FusedLion, "adagrad": torch.optim.Adagrad, "lamb": FusedLamb}
_REMOVED = ("onebitadam", "zerooneadam", "onebitlamb")


def of_config(described: Mapping[str, Any], parameters: Any) -> torch.optim.Optimizer:
    """The optimizer that the JSON names, over `parameters`: tensors or groups, whose own options hold."""
    kind = str(described.get("type", ""))
    options = {key: value for key, value in (described.get("params") or {}).items() if value != "auto"}
    of_ebb = {key: options.pop(key) for key in _OF_EBB if key in options}
    if options.pop("max_grad_norm", None):
        raise ValueError(_CLIPPING)
    if kind.lower() in _REMOVED:
        raise Error(f"optimizer.type '{kind}': DeepSpeed has removed it, and Ebb has none. Use AdamW or Lamb", "UNIMPLEMENTED")
    if kind.lower() == "muon":
        raise Error("optimizer.type 'Muon': DeepSpeed clips updates instead of gradients, and iterates in fp16. Ebb's numbers are torch.optim.Muon's: "
                    "use ebb.initialize (docs/python.md)", "UNIMPLEMENTED")
    made = _OF_JSON.get(kind.lower()) or getattr(torch.optim, kind, None)
    if made is FusedAdam:
        decoupled = bool(options.pop("adam_w_mode", True)) or kind.lower() == "adamw"
        if options.pop("torch_adam", False):  # whose decay has another default
            made = torch.optim.AdamW if decoupled else torch.optim.Adam
            options = {key: value for key, value in options.items() if key != "fp32_optimizer_states"}
        else:
            options["adam_w_mode"] = decoupled
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise Error(f"optimizer.type '{kind}' is not built: {', '.join(_OF_JSON)} and names of torch.optim are taken", "UNIMPLEMENTED")
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    optimizer = made(parameters, **options)
    optimizer.of_ebb = of_ebb
    return optimizer


def has_rule(optimizer: torch.optim.Optimizer) -> bool:
    """Otherwise its own code updates the shards."""
    return type(optimizer) in _RULES and not any(group.get(name) for group in optimizer.param_groups for name in ("amsgrad", "maximize"))


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """One group as the JSON's "optimizer"."""
    kind, names = _RULES[type(optimizer)]
    options = {name: group[name] for name in names if name in group}
    if "betas" in options:
        options["betas"] = [float(beta) for beta in options["betas"]]
    if type(optimizer) is torch.optim.Adam:
        options["adam_w_mode"] = bool(group.get("decoupled_weight_decay", False))
    return {"type": kind, "params": {**{name: float(group[name]) for name in _LATER if name in group}, **options, **getattr(optimizer, "of_ebb", {})}}


class Groups:
    """The groups of an optimizer for ebb.initialize, and their rates for each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        self.optimizer = optimizer
        self.own = None if has_rule(optimizer) else OwnUpdates(optimizer, model)
        self.groups = trained(optimizer)
        self.members = members_of(self.groups, model)
        self.names = list(self.members)
        self.not_fixed: set[str] = set()  # options that a schedule of the engine's changes, too
        self._fixed = [self._options(group) for group in self.groups]

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """"optimizer" and "ebb.parameter_groups" of the JSON."""
        rules = [rule_of(self.optimizer, group) for group in self.groups]
        return rules[0], {name: {"optimizer": rule} for name, rule in zip(self.names, rules)}

    def rates(self) -> list[tuple[str, float | None, float | None]]:
        """Of the next update. Raises if a group has changed what the engine cannot change."""
        if self.own is not None:
            return self.own.rates()
        for group, fixed in zip(self.groups, self._fixed):
            now = self._options(group)
            name = next((name for name in now if now[name] != fixed.get(name) and name not in self.not_fixed), None)
            if name is not None:
                raise Error(
                    f"param_groups[i]['{name}'] became {now[name]}: between updates \"lr\" and \"weight_decay\" alone may change. Give schedulers that "
                    "change the momentum cycle_momentum=False", "UNIMPLEMENTED"
                )
        return [
            (name, float(group["lr"]), float(group["weight_decay"]) if "weight_decay" in group else None)
            for name, group in zip(self.names, self.groups)
        ]

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = _RULES[type(self.optimizer)][1] if self.own is None else ()
        return {name: tuple(group[name]) if name == "betas" else group[name] for name in names if name in group}


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """What engine.optimizer is: the groups of the client's optimizer, as the same dicts. The engine has the states and steps."""

    of_engine = True

    def __init__(self, inner: torch.optim.Optimizer, engine: Any):
        self.__dict__.update(inner.__dict__)  # with its hooks, so that a scheduler finds here what it has there
        self.optimizer = inner
        self._engine = weakref.proxy(engine)  # a dropped engine closes itself
        self.loss_scale = 1.0  # of the next step
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def overflow(self) -> bool:
        report = self._engine._report()
        return report is not None and not report.applied

    cur_scale = property(lambda self: self.loss_scale)
    needs_scaler = lambda self: self._engine.fp16_enabled()
    _slices = lambda self: self._engine.ebb.slices_of_masters(self._engine._groups.members.values())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The update alone: engine.step() also counts, and steps the schedule."""
        if closure is not None:
            raise Error("step(closure) is not supported: call backward before step()", "UNIMPLEMENTED")
        self._engine._update_alone()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine._zero_grad_of_optimizer()

    def offload_states(self, *arguments: Any, **keywords: Any) -> None:
        self._engine.offload_states(*arguments, **keywords)

    def reload_states(self, non_blocking: bool = False) -> None:
        self._engine.reload_states()

    def state_dict(self) -> dict[str, Any]:
        """The groups. The states are in shards: engine.save_checkpoint has them."""
        return {"state": {}, "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]}

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **keywords: Any) -> None:
        if state_dict.get("state"):
            raise Error("optimizer.load_state_dict() of states: engine.load_checkpoint takes them from a folder", "UNIMPLEMENTED")
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(f"loaded state dict has {len(state_dict['param_groups'])} parameter groups, and the optimizer has {len(self.param_groups)}")
        for group, values in zip(self.param_groups, state_dict["param_groups"]):
            group.update({key: value for key, value in values.items() if key != "params"})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Error("add_param_group() after deepspeed.initialize: give all groups before it", "UNIMPLEMENTED")


class ZeROOptimizer(DeepSpeedOptimizer):
    """At stages 1 to 3."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """At stages 1 and 2."""

    single_partition_of_fp32_groups = property(lambda self: self._slices())


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """`parameter_offload` is this object. Programs take its hooks off while they generate with gathered parameters, and register them again."""

    fp32_partitioned_groups_flat = property(lambda self: self._slices())

    def __init__(self, inner: torch.optim.Optimizer, engine: Any):
        super().__init__(inner, engine)
        self.parameter_offload, self.module, self.backward_hooks = self, engine.module, []
        self.forward_hooks = [self]

    def remove(self) -> None:
        self._engine.ebb.is_paused = True

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        self._engine.ebb.is_paused, self.forward_hooks = False, [self]


CLASSES = (DeepSpeedOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)  # by stage


def parameters_in(groups: Iterable[Mapping[str, Any]]) -> Sequence[nn.Parameter]:
    return [parameter for group in groups for parameter in group["params"]]
