"""Single values of an engine's state: deepspeed.utils.safe_get_full_fp32_param and its like. Every rank calls them, also those for one rank's part: a
part has the elements of DeepSpeed's, ceil(elements / ranks) with zeros behind the last one, however Ebb divides the parameter."""

from functools import partial
from typing import Any, Iterable

import torch
import torch.distributed as dist
from torch import nn

from .._fixed import engine_of
from .._host_file import exchanged
from .._library import Error
from ..engine import Engine
from .zero import elements_of_part

_MASTER, _GRADIENT = "", "gradient"


def _engine_with(param: nn.Parameter) -> Engine:
    engine = engine_of(param)
    if engine is None:
        raise Error("a state is asked for of a parameter that no engine has: do that after deepspeed.initialize", "INVALID_ARGUMENT")
    return engine


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Between steps: a whole fp32 state, on the CPU; None for a frozen parameter."""
    return _engine_with(param).gather(param._ebb_name, master=True, state=optim_state_key) if param.requires_grad else None


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Between steps: every rank gives the same value."""
    if param.requires_grad:
        _engine_with(param).write(param._ebb_name, value.view(param.shape), optim_state_key)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    whole = safe_get_full_optimizer_state(param, optim_state_key)
    if whole is None:
        return None
    size = elements_of_part(whole.numel())
    part = whole.view(-1)[dist.get_rank() * size :][:size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Every rank gives its part."""
    parts = exchanged(value.detach().to("cpu", torch.float32).reshape(-1))
    safe_set_full_optimizer_state(param, torch.cat(parts)[: param.numel()], optim_state_key)


safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key=_MASTER)
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key=_MASTER)
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key=_MASTER)
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key=_MASTER)
# Of the step, between its last backward and engine.step().
safe_get_full_grad = partial(safe_get_full_optimizer_state, optim_state_key=_GRADIENT)
safe_set_full_grad = partial(safe_set_full_optimizer_state, optim_state_key=_GRADIENT)
safe_get_local_grad = partial(safe_get_local_optimizer_state, optim_state_key=_GRADIENT)
safe_set_local_grad = partial(safe_set_local_optimizer_state, optim_state_key=_GRADIENT)


def safe_update_full_grad_vectorized(param_list: Iterable[nn.Parameter], update_func: Any) -> None:
    """`update_func`(gradient, parameter) returns the new gradient."""
    for param in param_list:
        if param.requires_grad:
            safe_set_full_grad(param, update_func(safe_get_full_grad(param), param))
