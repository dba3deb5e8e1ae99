"""initialize(check=True): if an operator reads a parameter outside of its unit, an error names parameter, operator and line. Without the
check the operator would read NaN."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ._library import Error

if TYPE_CHECKING:
    from .engine import Engine

# Of properties, which ask for shapes and flags, those that lead to the values.
_VIEWS = {"T", "mT", "H", "mH", "real"}
_HARMLESS = {"size", "dim", "numel", "stride", "is_floating_point", "is_complex", "register_hook", "requires_grad_", "element_size",
             "is_contiguous", "data_ptr", "__repr__", "__hash__", "type", "storage_offset", "__len__", "detach", "empty_like", "zeros_like",
             "ones_like", "new_empty", "new_zeros", "is_same_size", "__get__", "__set__", "__delete__"}


def storage(tensor: torch.Tensor) -> int:
    """The same for all views of a tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


class Watch(TorchFunctionMode):
    """Calls `read`(name, what) for each operator that reads a parameter of `hidden`, while it is on."""

    def __init__(self, hidden: dict[int, str], read: Callable[[str, str], None], key: Callable[[torch.Tensor], int] = id):
        super().__init__()
        self.hidden = hidden  # by the key of a parameter its name, while it is hidden
        self.read = read
        self.key = key

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        of = getattr(getattr(function, "__self__", None), "__name__", "")
        if name not in _HARMLESS or (name == "__get__" and of in _VIEWS):
            for value in tree_flatten((arguments, keywords or {}))[0]:
                if isinstance(value, torch.Tensor) and (parameter := self.hidden.get(self.key(value))) is not None:
                    self.read(parameter, of if name == "__get__" else name)
        return function(*arguments, **(keywords or {}))


def _refuse(parameter: str, what: str) -> None:
    where = next((frame for frame in reversed(traceback.extract_stack()) if not _is_inner(frame.filename)), None)
    raise Error(
        f"'{parameter}' is read by {what} outside of its unit"
        + (f", at {where.filename}:{where.lineno}" if where else "")
        + ": name it in resident=, or make the modules that use it one unit (units=)"
    )


def _is_inner(path: str) -> bool:
    return "/torch/" in path or path == __file__


class _Attached:
    def __init__(self, handles: list[Any]):
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def attach(engine: "Engine") -> _Attached:
    """Turns the mode on whenever the model runs forward."""
    hidden = {id(parameter): name for unit in engine.units if not unit.keep_whole for name, parameter in zip(unit.names, unit.parameters)}
    for slots in engine._slots:
        if slots.keep_whole:
            continue

        def show(of=slots, shown=slots.show) -> None:
            shown()
            for parameter in of.parameters:
                hidden.pop(id(parameter), None)

        def hide(of=slots, concealed=slots.hide) -> None:
            concealed()
            for parameter in of.parameters:
                hidden[id(parameter)] = parameter._ebb_name

        slots.show, slots.hide = show, hide  # type: ignore[method-assign]
    modes: list[Watch] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            modes.append(Watch(hidden, _refuse))
            modes[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        if modes and torch._C._current_graph_task_id() == -1:
            modes.pop().__exit__(None, None, None)

    model = engine.model
    return _Attached([model.register_forward_pre_hook(enter, prepend=True), model.register_forward_hook(leave, always_call=True)])
