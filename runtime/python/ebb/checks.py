"""Checks a loss. Finds operators that read a parameter outside of its unit in the forward that shows the order of units, where parameters are fake tensors."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.overrides import TorchFunctionMode

from ._blocks import local_of
from ._hidden import HARMLESS, PROPERTIES, VIEW_PROPERTIES, memory_of, tensors_in
from ._library import Error

_HARMLESS = HARMLESS | PROPERTIES | {"detach", "type", "__repr__"}


def storage(tensor: torch.Tensor) -> int:
    """The same for all views of a tensor."""
    tensor = local_of(tensor)
    return memory_of(tensor) if tensor.layout == torch.strided and not _is_wrapped(tensor) else 0


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # within torch.func, without memory of its own


class Watch(TorchFunctionMode):
    """Calls `read`(name, what) for each operator that reads a tensor which has a name by `name_of`, while it is on."""

    def __init__(self, name_of: Callable[[torch.Tensor], str | None], read: Callable[[str, str], None]):
        super().__init__()
        self.name_of = name_of
        self.read = read

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        for value in tensors_in(arguments, keywords):
            read = self.name_of(value)
            if read is not None:
                name = getattr(function, "__name__", str(function))
                of = getattr(getattr(function, "__self__", None), "__name__", "")
                if name not in _HARMLESS or (name == "__get__" and of in VIEW_PROPERTIES - {"data"}):
                    self.read(read, of if name == "__get__" else name)
        return function(*arguments, **keywords)


def check_loss(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
        kind = f"a tensor of {loss.dtype}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise Error(f"the loss is {kind}: backward takes a tensor of floating-point numbers", "INVALID_ARGUMENT")
    if loss.numel() != 1:
        raise Error(f"the loss has the shape {list(loss.shape)}: backward takes a scalar", "INVALID_ARGUMENT")
    if not loss.requires_grad:
        raise Error("the loss needs no gradient: it was detached, or computed under torch.no_grad()", "INVALID_ARGUMENT")
