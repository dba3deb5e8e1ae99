"""Small functions and classes of deepspeed.utils and of activation checkpointing."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from typing import Any, Callable, Iterator

import torch
from torch import nn
from torch.utils._pytree import tree_map

from .. import empty_parameters
from .._library import Error
from .._world import is_open, meet

logger = logging.getLogger("ebb.deepspeed")
logger.setLevel(logging.INFO)


def log_dist(message: str, ranks: Any = None, level: int = logging.INFO, use_logger: bool = True) -> None:
    rank = meet().rank if is_open() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


warning_once = functools.cache(logger.warning)
instrument_w_nvtx = lambda function: function


def see_memory_usage(message: str, force: bool = False) -> None:
    """Does nothing: engine.ebb.memory() has the bytes."""


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] = torch.is_tensor) -> Any:
    """The tensors in lists, tuples and dicts, on `device`."""
    return tree_map(lambda one: one.to(device) if criterion_func(one) else one, item)


recursive_getattr = lambda model, module_name: functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    above, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, last, module)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype | None = None, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """On "meta": parameters of modules that are made here take no memory."""
    with contextlib.ExitStack() as stack:
        if enabled and device == "meta":
            stack.enter_context(empty_parameters())
        elif enabled:
            stack.enter_context(torch.device(device))
        before = torch.get_default_dtype()
        try:
            if enabled and dtype is not None:
                torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(before)


def clone_tensors_for_torch_save(item: Any, device: Any = torch.device("cpu")) -> Any:
    """Copies without the rest of the storages that tensors are views of."""
    return tree_map(lambda one: one.detach().to(device, copy=True) if isinstance(one, torch.Tensor) else one, item)


# Marks of modules. What is in one is gathered together.


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True, flag: bool = True) -> list[nn.Module]:
    """Marks the modules of these classes, or class names."""
    kinds = tuple(one for one in leaf_module_classes if isinstance(one, type))
    is_one = lambda kind: kind.__name__ in leaf_module_classes or f"{kind.__module__}.{kind.__qualname__}" in leaf_module_classes
    found = [one for one in model.modules() if isinstance(one, kinds) or is_one(type(one))]
    if not found and raise_if_not_found:
        raise ValueError(f"No modules of type {leaf_module_classes} found in model {type(model).__name__}")
    return [set_z3_leaf_module(one, flag) for one in found]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True, fits: Callable[[str, str], bool] = str.__eq__
) -> tuple[list[nn.Module], list[str]]:
    """Returns the modules, and the names that fit none."""
    modules = dict(model.named_modules())
    missing = [name for name in module_names if not any(fits(path, name) for path in modules)]
    if missing and raise_if_not_found:
        raise ValueError(f"No modules named {missing} found in model {type(model).__name__}")
    return [set_z3_leaf_module(one, flag) for path, one in modules.items() if any(fits(path, name) for name in module_names)], missing


set_z3_leaf_modules_by_suffix = functools.partial(set_z3_leaf_modules_by_name, fits=str.endswith)


MARKS = {"classes": set_z3_leaf_modules, "names": set_z3_leaf_modules_by_name, "name_suffixes": set_z3_leaf_modules_by_suffix}  # by keys of the JSON


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[Any], raise_if_not_found: bool = True) -> list[nn.Module]:
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found, flag=False)


z3_leaf_module = lambda model: bool(getattr(model, "_z3_leaf", False))
get_z3_leaf_modules = lambda model: [one for one in model.modules() if z3_leaf_module(one)]


def set_z3_leaf_module(module: nn.Module, flag: bool) -> nn.Module:
    module._z3_leaf = flag
    return module


# Activation checkpointing.

_is_configured = False


def checkpoint(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """torch.utils.checkpoint, not reentrant."""
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False, **keywords)


non_reentrant_checkpoint = checkpoint


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Notes that it was called: the engine's JSON has "activation_checkpointing"."""
    global _is_configured
    _is_configured = True


is_configured = lambda: _is_configured


def reset() -> None:
    """Nothing is kept between forwards."""


# Experts that are spread over ranks, which no model here has.

is_moe_param = lambda param: False


def split_params_into_different_moe_groups_for_optimizer(param_groups: Any, max_group_size: Any = None) -> list[dict[str, Any]]:
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


# Constants and classes that programs compare.


class OpBuilder:
    """Ebb has its operators built."""

    NAME = "ebb"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        raise Error(f"{type(self).__name__}().load(): Ebb's operators are in libebb.so, and have no module of Python", "UNIMPLEMENTED")


def __getattr__(name: str) -> Any:
    """FusedAdamBuilder and others."""
    if not name.endswith("Builder"):
        raise AttributeError(name)
    key = re.sub("(?<=[a-z])(?=[A-Z])|(?<=CPU)", "_", name.removesuffix("Builder")).lower()
    globals()[name] = made = type(name, (OpBuilder,), {"NAME": key})
    return made


class UlyssesSPAttentionHF:
    @staticmethod
    def register_with_transformers(*arguments: Any, sequence_parallel_size: int = 1, **keywords: Any) -> None:
        if sequence_parallel_size > 1:
            raise Error("UlyssesSPAttentionHF: sequence parallelism is not built, so every rank is data-parallel", "UNIMPLEMENTED")


class TorchCheckpointEngine:
    """For programs that name the class."""

