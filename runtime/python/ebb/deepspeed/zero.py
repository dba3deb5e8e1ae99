"""deepspeed.zero: contexts in which parameters are whole, and single values of an engine's state."""

from __future__ import annotations

import enum
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._library import Error
from ..engine import Engine

_ids = itertools.count()


class ZeroParamType(enum.Enum):
    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def is_zero_param(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


class Init:
    """Parameters of modules that are made within it get the `ds_` attributes. Their values are whole on every rank until
    deepspeed.initialize, and those of rank 0 are taken there."""

    _open = 0

    def __init__(self, module: nn.Module | None = None, *arguments: Any, enabled: bool = True, **keywords: Any):
        self.enabled = enabled
        if module is not None and enabled:
            for parameter in module.parameters():
                _mark(parameter)

    def __enter__(self) -> "Init":
        if self.enabled:
            if Init._open == 0:
                Init._before = nn.Module.register_parameter
                nn.Module.register_parameter = _registered  # type: ignore[method-assign]
            Init._open += 1
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            Init._open -= 1
            if Init._open == 0:
                nn.Module.register_parameter = Init._before  # type: ignore[method-assign]


def _registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    Init._before(module, name, parameter)
    if parameter is not None:
        _mark(parameter)


def _mark(parameter: nn.Parameter) -> None:
    parameter.ds_id = next(_ids)
    parameter.ds_shape, parameter.ds_numel, parameter.ds_status = parameter.shape, parameter.numel(), ZeroParamStatus.AVAILABLE


def engine_of(parameter: torch.Tensor) -> Engine | None:
    """The open engine that has the parameter."""
    name = getattr(parameter, "_ebb_name", None)
    owner = name.owner() if name is not None and hasattr(name, "owner") else None
    engine = owner.model.__dict__.get("_ebb_engine") if owner is not None else None
    return engine() if engine is not None else None


def _engine_with(parameter: torch.Tensor, call: str) -> Engine:
    engine = engine_of(parameter)
    if engine is None:
        raise Error(f"{call}() of a parameter that no engine has: call it after deepspeed.initialize", "INVALID_ARGUMENT")
    return engine


class GatheredParameters:
    """Collective: within it parameters show their whole values. With `modifier_rank`, what that rank has changed is written, between steps.
    Of a model without an engine that rank's values are given to all ranks."""

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True):
        if isinstance(params, nn.Module):
            params = params.parameters(recurse=True)
        elif isinstance(params, torch.Tensor):
            params = [params]
        unique = {id(one): one for one in params if isinstance(one, torch.Tensor)} if enabled else {}
        self.params = list(unique.values())
        self.modifier_rank = modifier_rank
        self._lent: list[tuple[Engine, dict[str, torch.Tensor]]] = []

    def __enter__(self) -> Any:
        of_engine: dict[int, tuple[Engine, list[str]]] = {}
        for one in self.params:
            engine = engine_of(one)
            if engine is not None:
                of_engine.setdefault(id(engine), (engine, []))[1].append(str(one._ebb_name))
        try:
            for engine, names in of_engine.values():
                self._lent.append((engine, engine.lend(names)))
        except RuntimeError as error:
            self.__exit__(type(error), error, None)
            raise
        return self.params

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for engine, before in self._lent:
            values = engine.take_back(before)
            if self.modifier_rank is not None and error is None:
                self._write(engine, before, values)
        self._lent = []
        if self.modifier_rank is not None and error is None and _ranks() > 1:
            for one in self.params:
                if engine_of(one) is None and is_zero_param(one):
                    dist.broadcast(one.data, src=self.modifier_rank)

    def _write(self, engine: Engine, before: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
        changed = [[name for name in values if not torch.equal(values[name], before[name])]]
        if _ranks() > 1:
            dist.broadcast_object_list(changed, src=self.modifier_rank)
        written = {}
        for name in changed[0]:
            value = values[name].to(engine.device).contiguous()
            if _ranks() > 1:
                dist.broadcast(value, src=self.modifier_rank)
            written[name] = value
        if written:
            engine.write_all(written)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Before deepspeed.initialize: the parameter is kept whole. After it nothing is needed: the first batch shows what is used outside."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    module.__dict__.setdefault("_ebb_external", []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    external = module.__dict__.get("_ebb_external", [])
    module.__dict__["_ebb_external"] = [one for one in external if one is not parameter]


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """Collective: the whole master, on the CPU."""
    return _engine_with(param, "safe_get_full_fp32_param").gather(param._ebb_name, master=True)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Collective, between steps: every rank gives the same value."""
    _engine_with(param, "safe_set_full_fp32_param").write(param._ebb_name, value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor:
    """Collective, between steps: a whole fp32 state, on the CPU."""
    engine = _engine_with(param, "safe_get_full_optimizer_state")
    values, is_here = engine.read_slices(param._ebb_name, optim_state_key)
    if _ranks() > 1:
        both = torch.stack((values, is_here)).to(engine.device)
        dist.all_reduce(both)
        values, is_here = both.cpu()
    return (values / is_here).view(param.shape)
