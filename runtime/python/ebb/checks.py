"""Finds operators that read a parameter outside of its unit, and so NaN: in the loss, and with initialize(check=True) within the model. An
error names parameter, operator and line."""

from __future__ import annotations

import traceback
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ._library import Error
from ._tensors import Slots

if TYPE_CHECKING:
    from ._steps import Steps
    from .engine import Engine

# Of properties, which ask for shapes and flags, those that lead to the values.
_VIEWS = {"T", "mT", "H", "mH", "real"}
_HARMLESS = {"size", "dim", "numel", "stride", "is_floating_point", "is_complex", "register_hook", "requires_grad_", "element_size",
             "is_contiguous", "data_ptr", "untyped_storage", "__repr__", "__hash__", "type", "storage_offset", "__len__", "detach", "empty_like",
             "zeros_like", "ones_like", "new_empty", "new_zeros", "is_same_size", "__get__", "__set__", "__delete__"}
# Those whose result is no NaN where a parameter is one.
_LOSE_NAN = {"lt", "le", "gt", "ge", "eq", "ne", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "less", "less_equal", "greater",
             "greater_equal", "not_equal", "sign", "sgn", "nan_to_num", "argmax", "argmin", "sort", "argsort", "topk", "count_nonzero", "nonzero",
             "nansum", "nanmean", "fmax", "fmin"}


def storage(tensor: torch.Tensor) -> int:
    """The same for all views of a tensor."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided and not _is_wrapped(tensor) else 0


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # within torch.func, without memory of its own


class Watch(TorchFunctionMode):
    """Calls `read`(name, what) for each operator that reads a tensor which has a name by `name_of`, while it is on."""

    def __init__(self, name_of: Callable[[torch.Tensor], str | None], read: Callable[[str, str], None]):
        super().__init__()
        self.name_of = name_of
        self.read = read

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        for value in _tensors_in(arguments, keywords):
            read = self.name_of(value)
            if read is not None:
                name = getattr(function, "__name__", str(function))
                of = getattr(getattr(function, "__self__", None), "__name__", "")
                if name not in _HARMLESS or (name == "__get__" and of in _VIEWS):
                    self.read(read, of if name == "__get__" else name)
        return function(*arguments, **keywords)


def _tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(*value)
        elif isinstance(value, dict):
            yield from _tensors_in(*value.values())


def _where() -> str:
    frame = next((frame for frame in reversed(traceback.extract_stack()) if not _is_inner(frame.filename)), None)
    return f" at {frame.filename}:{frame.lineno}" if frame else ""


def _refuse(parameter: str, what: str) -> None:
    raise Error(
        f"'{parameter}' is read by {what} outside of its unit,{_where()}: name it in resident=, or make the modules that use it one unit (units=)"
    )


def _is_inner(path: str) -> bool:
    return "/torch/" in path or path == __file__


class _Resident(str):
    """The name of a parameter that is always readable."""


class _Hidden:
    """The names of parameters that show NaN, by the address of the NaN. So it finds their views and detached ones too. `has_residents`: and the
    names of residents, by the addresses of their values."""

    def __init__(self, slots: list[Slots], has_residents: bool = False):
        self.names: dict[int, str] = {}
        for one in slots:
            hidden, shown = one.places or ([], [])
            if not one.keep_whole:
                self.names.update(zip(hidden, one.names))
            elif has_residents:
                self.names.update(zip(shown, map(_Resident, one.names)))

    def __call__(self, value: torch.Tensor) -> str | None:
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided or value.is_meta or _is_wrapped(value):
            return None
        try:
            return self.names.get(value.data_ptr())
        except RuntimeError:  # a fake tensor that torch is making
            return None


class Reads:
    """Outside of the model's forward and backward: notes the first read of a hidden parameter, which is perhaps by the loss, and gives the
    first reader of a resident one the values after the last update."""

    def __init__(self, steps: "Steps"):
        self.steps = steps
        self.first = ""
        self.mode: Watch | None = None

    def begin(self) -> None:
        self.pause()
        note = weakref.WeakMethod(self._note)  # an engine that was not closed is freed all the same

        def read(name: str, what: str) -> None:
            if (living := note()) is not None:
                living(name, what)

        self.mode = Watch(_Hidden(self.steps.slots, has_residents=self.steps.is_stale), read)
        _put_below(self.mode)

    def pause(self) -> None:
        mode, self.mode = self.mode, None
        if mode is not None:
            for one in _all_taken():
                if one is not mode:
                    _push_mode(one)

    def end(self) -> str:
        """In words the read since the last end(); empty: there was none."""
        self.pause()
        first, self.first = self.first, ""
        return first

    def _note(self, name: str, what: str) -> None:
        if isinstance(name, _Resident):
            return self._refresh(name, what)
        if what in _LOSE_NAN:
            _refuse(name, what)
        self.first = self.first or f"'{name}' was read by {what} outside of its unit,{_where()}"


    def _refresh(self, name: str, what: str) -> None:
        is_write = what.startswith("__i") or what.endswith("_") and not what.startswith("__")  # an error of its own
        if not self.steps.is_stale or is_write:
            return
        if self.steps.ranks == 1:
            self.steps.refresh_residents()
        elif torch.is_grad_enabled():  # the other ranks may not read it, and do not wait for this one
            raise Error(f"'{name}' is read by {what} before the model's forward,{_where()}, and still has the value of the forward before: read it "
                        "within the forward or after it. Under torch.no_grad() the old value is given")


def _put_below(mode: Watch) -> None:
    """Below the modes that the trainer's own code has entered, because leaving one takes the uppermost. Torch wants the one of
    torch.set_default_device at the bottom."""
    others = _all_taken()
    at_bottom = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    below = [one for one in others if one is at_bottom]
    for one in (*below, mode, *(one for one in others if one is not at_bottom)):
        _push_mode(one)


def _all_taken() -> list[Any]:
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]


class _Attached:
    def __init__(self, handles: list[Any]):
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def attach(engine: "Engine") -> _Attached:
    """Turns the mode on whenever the model runs forward."""
    modes: list[Watch] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            modes.append(Watch(_Hidden(engine._slots), _refuse))
            modes[-1].__enter__()

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        if modes and torch._C._current_graph_task_id() == -1:
            modes.pop().__exit__(None, None, None)

    model = engine.model
    return _Attached([model.register_forward_pre_hook(enter, prepend=True), model.register_forward_hook(leave, always_call=True)])
