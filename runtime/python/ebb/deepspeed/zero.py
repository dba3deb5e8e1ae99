"""deepspeed.zero: models of which a host has one copy, and contexts in which parameters are whole."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import math
import weakref
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from .._fixed import engine_of
from .._host_file import HostFile, HostValue
from .._model import compute_dtype
from ..engine import Engine
from . import comm
from .config import read

_ids = itertools.count()
ZeroParamType = enum.Enum("ZeroParamType", "NORMAL PARTITIONED REMOTE")
ZeroParamStatus = enum.Enum("ZeroParamStatus", "AVAILABLE NOT_AVAILABLE INFLIGHT")
OffloadDeviceEnum = enum.Enum("OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str)
OffloadStateTypeEnum = enum.Enum(
    "OffloadStateTypeEnum", {name: name for name in ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")}, type=str
)


def is_zero_param(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id")


def mark(parameter: nn.Parameter) -> None:
    """Gives it the attributes that programs ask for."""
    if not is_zero_param(parameter):
        parameter.ds_id = next(_ids)
    parameter.ds_shape, parameter.ds_numel, parameter.ds_status = parameter.shape, parameter.numel(), ZeroParamStatus.NOT_AVAILABLE
    parameter.ds_tensor, parameter.ds_active_sub_modules = torch.empty(0, dtype=parameter.dtype), set()
    parameter.partition_numel = functools.partial(elements_of_part, parameter.numel())


def elements_of_part(elements: int) -> int:
    """Of a rank, in DeepSpeed's division of a parameter."""
    return math.ceil(elements / _ranks())


class Init:
    """Parameters of modules that are made within it have no elements outside of GatheredParameters, until deepspeed.initialize. A host has one copy
    of their values: in RAM, or, if the configuration offloads parameters to a disk, there. Parameters have the configuration's type, and the copy has
    the type that they are made in, so that masters begin with all digits."""

    _open: list["Init"] = []

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True, remote_device: str | None = None,
        pin_memory: bool = False, config_dict_or_path: Any = None, config: Any = None, enabled: bool = True, dtype: torch.dtype | None = None,
        *arguments: Any, **keywords: Any,
    ):
        self.enabled = enabled
        if not enabled:
            return
        comm.init_distributed()
        given = config_dict_or_path if config_dict_or_path is not None else config
        settings = read(given) if given is not None else {}
        self.dtype = dtype if dtype is not None or given is None else compute_dtype(settings)
        offload = (settings.get("zero_optimization") or {}).get("offload_param")
        on_disk = isinstance(offload, Mapping) and (remote_device or offload.get("device")) == "nvme"
        self._folder = str(offload["nvme_path"]) if on_disk and offload.get("nvme_path") else None
        if module is not None:
            self._take(HostFile(self._folder), module.parameters())

    def __enter__(self) -> "Init":
        if self.enabled:
            if not Init._open:
                self._file = HostFile(self._folder)
                self._registered: dict[int, Any] = {}  # parameters whose modules are being made, by id: weak references
                self._apply = nn.Module.apply
                nn.Module.apply = _applying(self._apply)  # type: ignore[method-assign]
                of_torch = nn.modules.module
                self._hooks = [of_torch.register_module_parameter_registration_hook(self._has_parameter),
                               of_torch.register_module_module_registration_hook(self._has_module)]
            Init._open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            Init._open.pop()
            if not Init._open:
                nn.Module.apply = self._apply  # type: ignore[method-assign]
                for hook in self._hooks:
                    hook.remove()
                if error[0] is None:
                    self._take_registered(one() for one in list(self._registered.values()))
                    self._file.agree()

    def _has_parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, nn.Parameter):
            self._registered[id(parameter)] = weakref.ref(parameter)

    def _has_module(self, above: nn.Module, name: str, module: Any) -> None:
        """The __init__ of `module` has ended."""
        if isinstance(module, nn.Module):
            self._take_registered(module.parameters())

    def _take_registered(self, parameters: Iterable[nn.Parameter | None]) -> None:
        self._take(self._file, [one for one in parameters if one is not None and self._registered.pop(id(one), None) is not None])

    def _take(self, file: HostFile, parameters: Iterable[nn.Parameter]) -> None:
        for one in parameters:
            if nn.parameter.is_lazy(one) or one.is_meta or not one.is_floating_point() or hasattr(one, "_ebb_kept"):
                continue
            one._ebb_kept = HostValue(file, one)
            one.data = one.data.to(dtype=self.dtype)
            mark(one)
            _hide(one, one.dtype)


MiCS_Init = Init


def _applying(apply: Callable[..., Any]) -> Callable[..., Any]:
    def applied(module: nn.Module, function: Callable[[nn.Module], Any]) -> Any:
        def gathered(one: nn.Module) -> None:
            with GatheredParameters(one.parameters(recurse=False), modifier_rank=0):
                function(one)

        gathered.gathers = True  # apply() calls itself for the modules below
        return apply(module, function if hasattr(function, "gathers") else gathered)

    return applied


def _hide(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.data = torch.empty(0, dtype=dtype)
    parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def show(model: nn.Module) -> None:
    """Collective, at the begin of deepspeed.initialize: parameters show the copy of this host."""
    for one in _agreed(model.parameters()):
        one.data = one._ebb_kept.view()
        del one._ebb_kept


def _agreed(parameters: Iterable[torch.Tensor]) -> list[nn.Parameter]:
    """Collective: those with values in files, which are complete."""
    kept = [one for one in parameters if hasattr(one, "_ebb_kept")]
    for file in {id(one._ebb_kept.file): one._ebb_kept.file for one in kept}.values():
        file.agree()
    return kept


def zero_wrapper_for_fp_tensor_constructor(constructor: Any, *arguments: Any, **keywords: Any) -> Any:
    """transformers replaces it while it makes a model. Constructors of tensors are left alone here."""
    return constructor


class GatheredParameters:
    """Collective: within it parameters show their whole values. With `modifier_rank`, what that rank has changed is written, between steps.
    Of a model without an engine that rank's values are given to all ranks, and they have the type that they are kept in: an fp32 file is read
    into fp32 values, also beside bf16."""

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True):
        if isinstance(params, nn.Module):
            params = params.parameters(recurse=True)
        elif isinstance(params, torch.Tensor):
            params = [params]
        unique = {id(one): one for one in params if isinstance(one, torch.Tensor)} if enabled else {}
        # In one order on all ranks: programs give sets.
        self.params = sorted(unique.values(), key=lambda one: getattr(one, "ds_id", -1))
        self.modifier_rank = modifier_rank
        self._lent: list[tuple[Engine, dict[str, torch.Tensor]]] = []
        self._shown: list[tuple[nn.Parameter, torch.Tensor, torch.dtype]] = []

    def __enter__(self) -> Any:
        of_engine: dict[int, tuple[Engine, list[str]]] = {}
        for one in self.params:
            engine = engine_of(one)
            if engine is not None:
                of_engine.setdefault(id(engine), (engine, []))[1].append(str(one._ebb_name))
        try:
            for engine, names in of_engine.values():
                self._lent.append((engine, engine.lend(names)))
            self._show()
        except RuntimeError as error:
            self.__exit__(type(error), error, None)
            raise
        self._set_status(ZeroParamStatus.AVAILABLE)
        return self.params

    def _show(self) -> None:
        for one in self.params:
            if hasattr(one, "_ebb_kept") and one.ds_status == ZeroParamStatus.AVAILABLE:
                raise RuntimeError("a parameter is gathered already: contexts over one parameter cannot be nested")
        for one in _agreed(self.params):
            view = one._ebb_kept.view(writes=self.modifier_rank == dist.get_rank())
            self._shown.append((one, view, one.dtype))
            one.data = view if self.modifier_rank is not None else view.to(one.dtype)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        writes = self.modifier_rank is not None and error is None
        for engine, before in self._lent:
            values = engine.take_back(before)
            if writes:
                self._write(engine, before, values)
        for one, view, dtype in self._shown:
            value = one.data
            if writes and self.modifier_rank == dist.get_rank() and value.data_ptr() != view.data_ptr():
                view.copy_(value)
            if writes:
                one._ebb_kept.put(view, self.modifier_rank, is_there=True)
            _hide(one, dtype)
        if writes:
            _agreed(one for one, *_ in self._shown)
        self._set_status(ZeroParamStatus.NOT_AVAILABLE)
        self._lent, self._shown = [], []

    def _set_status(self, status: ZeroParamStatus) -> None:
        for one in self.params:
            if is_zero_param(one):
                one.ds_status = status

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


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Within it an engine at stage 3 generates with whole values."""
    with GatheredParameters(model.parameters()):
        model.ebb.is_paused = True
        try:
            yield model
        finally:
            model.ebb.is_paused = False


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
