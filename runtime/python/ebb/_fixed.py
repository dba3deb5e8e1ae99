"""What initialize refuses of a model, and what the model must not become afterwards."""

from __future__ import annotations

import itertools
import sys
import traceback
from typing import Any, Iterator

import torch
from torch import nn

from ._blocks import is_dtensor
from ._library import Error

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def _is_wrapper(module: nn.Module) -> bool:
    """Also FSDP2's fully_shard, which changes the class of a module."""
    return any(kind.__name__ in _WRAPPERS or kind.__name__.startswith("FSDP") for kind in type(module).__mro__)


def engine_with(model: nn.Module) -> Any:
    """The open Engine that has been made of `model`; None if there is none."""
    engine = model.__dict__.get("_ebb_engine")
    return engine() if engine is not None else None


def engine_of(parameter: torch.Tensor) -> Any:
    """The open Engine that has the parameter; None if there is none."""
    name = getattr(parameter, "_ebb_name", None)
    owner = name.owner() if name is not None and hasattr(name, "owner") else None
    return engine_with(owner.model) if owner is not None else None


def refuse(model: nn.Module) -> None:
    """Raises an error that names what cannot be sharded."""
    if engine_with(model) is not None:
        raise Error(f"{type(model).__name__} has an engine: close() it first", "ALREADY_EXISTS")
    if torch.is_inference_mode_enabled():
        raise Error("initialize under torch.inference_mode(): torch cannot train its tensors", "INVALID_ARGUMENT")
    for path, module in model.named_modules():
        kind = type(module).__name__
        if _is_wrapper(module):
            raise Error(f"'{path or kind}' is wrapped in {kind}: give initialize the plain module", "UNIMPLEMENTED")
        if hasattr(module, "_hf_hook"):
            raise Error(f"'{path or kind}' has hooks of accelerate, which move parameters: remove them first", "UNIMPLEMENTED")
        if isinstance(module, torch.jit.ScriptModule):
            raise Error(f"'{path or kind}' is a script of torch.jit", "UNIMPLEMENTED")
        if type(module).__module__.startswith("torch.distributed.pipelining"):
            raise Error(f"'{path or kind}' is of torch's pipeline parallelism: give initialize the plain module", "UNIMPLEMENTED")
        if (getattr(module, "_tp_size", None) or 1) > 1 and not any(map(is_dtensor, module.parameters())):
            raise Error(
                f"'{path or kind}' was loaded with a tp_plan by a transformers whose parameters are no DTensors, so that their whole shapes are not "
                "known: take a newer one", "UNIMPLEMENTED"
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_ebb_name", None) is not None:
            raise Error(f"another engine has parameter '{name}' already, as '{parameter._ebb_name}': close() that engine first", "ALREADY_EXISTS")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise Error(f"buffer '{name}' is on the meta device: make the model under ebb.empty_parameters(), which leaves buffers real")


def _refuse_wrapper(module: nn.Module, name: str, inner: Any) -> None:
    """Torch calls this for each module that any module gets."""
    if _is_wrapper(module) and isinstance(inner, nn.Module):
        sharded = next((of for one in inner.parameters() if (of := getattr(one, "_ebb_name", None)) is not None), None)
        if sharded is not None:
            raise Error(f"{type(module).__name__} around a model whose '{sharded}' an engine has: call the model itself", "UNIMPLEMENTED")


def refuse_wrappers() -> None:
    """Makes DDP, FSDP and DataParallel around a model of an engine raise."""
    nn.modules.module.register_module_module_registration_hook(_refuse_wrapper)


class Members:
    """The modules and parameters that a model had at initialize. Each forward compares them, in 0.1 ms for 1000 modules."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.parameters = {id(parameter) for parameter in model.parameters()}
        self.places = dict(self._places())
        self._note()

    def check(self) -> None:
        """Raises if the model has got, lost or moved a parameter."""
        if self._ids() != self.ids:
            self._compare()
            self._note()  # only modules without parameters have changed

    def _note(self) -> None:
        self.tables = [table.values() for module in self.model.modules() for table in (module._parameters, module._modules)]
        self.ids = self._ids()

    def _ids(self) -> list[int]:
        return list(map(id, itertools.chain.from_iterable(self.tables)))

    def _places(self) -> Iterator[tuple[tuple[int, str], tuple[str, Any]]]:
        """Each parameter and its name, by the module that has it, and its name there."""
        for path, module in self.model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    yield (id(module), key), (f"{path}.{key}" if path else key, parameter)

    def _compare(self) -> None:
        now = dict(self._places())
        for place, (name, parameter) in now.items():
            earlier = self.places.get(place, (name, None))[1]
            if parameter is earlier:
                continue
            if id(parameter) in self.parameters:
                raise Error(
                    f"'{name}' became parameter '{parameter._ebb_name}' after ebb.initialize, but the engine gathers that for the modules that had "
                    "it: tie, parametrize and move parameters before ebb.initialize"
                )
            refuse_added(name, parameter, earlier)
        kept = {id(parameter) for _, parameter in now.values()}
        for name, parameter in self.places.values():
            if id(parameter) not in kept:
                raise Error(f"'{name}' was removed from the model after ebb.initialize, but the engine trains it: remove it before ebb.initialize")


def refuse_added(name: str, parameter: Any, earlier: Any = None) -> None:
    """Raises because the engine has `earlier`, or nothing, in this place."""
    if is_dtensor(parameter):
        raise Error(
            f"'{name}' became a DTensor after ebb.initialize: call parallelize_module before it, and leave out FSDP2 (fully_shard), which would shard "
            "what the engine shards",
            "UNIMPLEMENTED",
        )
    what = "came into the model"
    if earlier is not None and not isinstance(parameter, nn.Parameter):
        raise Error(
            f"'{name}' was replaced by a tensor (as torch.func.functional_call does), so the engine would not train it: change its value with "
            "engine.write, or use a model without an engine", "UNIMPLEMENTED"
        )
    if earlier is not None:
        what = "was replaced by another parameter"
        for of, old, new in (("shape", list(earlier.shape), list(parameter.shape)), ("device", earlier.device, parameter.device)):
            if old != new:
                what += f", with the {of} {new} instead of {old},"
    raise Error(
        f"'{name}' {what} after ebb.initialize, so the engine does not train it: add, replace and resize parameters before ebb.initialize, "
        "and keep those with an optimizer of their own outside of the model"
    )


def refuse_caller() -> None:
    """Raises within a forward that another way of running the model calls."""
    if torch.jit.is_tracing():
        raise Error("torch.jit.trace of a model that an engine has: its parameters have values only while their unit runs", "UNIMPLEMENTED")
    if "torch.distributed.pipelining" in sys.modules:
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if frame.f_globals.get("__name__", "").startswith("torch.distributed.pipelining."):
                raise Error(
                    "the model is a stage of torch's pipeline parallelism, so ranks call it at different times: pipeline parallelism is not "
                    "supported, call the model itself", "UNIMPLEMENTED"
                )
