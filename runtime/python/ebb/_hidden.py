"""A parameter without a value has another class, so that torch asks this file about every operator that takes it, in any thread. Shapes and
flags are given, and what would read the value is an error that names the parameter. Other tensors are as fast as before.

  hidden      outside of its unit, and after close(). Its storage has no memory, so that what torch does not ask about is an error as well. With
              shows_values a read between steps makes all parameters that are whole on every rank show their values
  stale       a resident parameter between step() and the first read or the next forward, with the value before the update
  taken       what stands in `.grad` for a gradient that the engine has taken, until the step ends
  copied      this rank's slices of masters, to read: what is written to a copy would be lost

What is made from one of these without a copy, by `.data` or detach(), has such a class too."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import sys
import traceback
import weakref
from typing import Any, Iterable, Iterator, Protocol

import torch
from torch import nn

from ._blocks import local_of, set_local
from ._library import Error

PROPERTIES = {"__get__", "__set__", "__delete__"}
# Of torch's operators, those that need no value.
HARMLESS = {
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "get_device", "is_contiguous", "is_complex",
    "is_floating_point", "is_signed", "is_conj", "is_neg", "is_pinned", "is_shared", "is_inference", "is_same_size", "is_set_to", "is_tensor",
    "data_ptr", "storage", "untyped_storage", "_typed_storage", "_is_view", "__hash__", "__len__", "__dir__", "__dlpack_device__", "requires_grad_",
    "retain_grad", "register_hook", "register_post_accumulate_grad_hook", "get_gradient_edge", "grad", "backward", "empty_like", "zeros_like", "ones_like",
    "full_like", "rand_like", "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "result_type",
    "_has_compatible_shallow_copy_type",
}
_VIEWS = {"detach", "alias", "view", "view_as", "expand_as", "flatten", "t", "transpose", "permute", "squeeze", "unsqueeze"}
VIEW_PROPERTIES = {"data", "T", "mT", "H", "mH", "real"}
# They give the tensor itself if it is so already.
_ADDRESSES = {"data_ptr", "storage", "untyped_storage", "_typed_storage"}
_CONVERSIONS = {"to", "type", "type_as", "float", "half", "double", "bfloat16", "cpu", "cuda"}
_WRITES = {"__setitem__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
}
_NO_VALUE = "has no value here"  # in torch's errors
_OF_EBB, _OF_PYTHON = os.path.dirname(__file__), os.path.dirname(os.__file__)
as_plain = torch._C.DisableTorchFunctionSubclass


class Owner(Protocol):
    """The engine of a parameter that has no value."""

    advice: str  # behind errors, for programs that do not call it by its own names

    def has_taken(self, name: str) -> bool: ...  # the gradient, in the open step
    def brings_in(self, name: str) -> bool: ...  # whether it shows its value between steps, which this call has made it do
    def makes_current(self) -> bool: ...  # whether residents have their new values, which this call gets
    def fail(self, error: Error) -> None: ...  # ends the step that is open in this thread, perhaps of this rank alone, on every rank


class Name(str):
    """The engine's name of a parameter, and the engine. It is pickled as a str."""

    def __new__(cls, name: str, owner: Owner) -> "Name":
        made = super().__new__(cls, name)
        made.owner = weakref.ref(owner)  # an engine that was not closed is freed all the same
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (str(self),)


class _Guard:
    """The methods have names that torch's tensors do not have."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        what = getattr(function, "__name__", str(function))
        if what in PROPERTIES:
            return _of_property(function, what, *arguments)
        first = arguments[0] if arguments else next(iter(keywords.values()), None)
        if what in ("__repr__", "__format__") and isinstance(first, _Guard) and (text := first._ebb_text()):
            return text
        if what in _VIEWS and isinstance(first, Hidden) and first._ebb_shows() and _is_within(nn.Parameter.__new__):
            return nn.Parameter(first)  # torch has asked for the class before
        if what not in HARMLESS and what not in _VIEWS and what not in _CONVERSIONS:
            writes = what in _WRITES or what.endswith("_") and not what.startswith("__")
            written = list(map(id, tensors_in(first))) if writes else ()
            for value in tensors_in(arguments, keywords):
                if isinstance(value, _Guard):
                    value._ebb_write(what) if id(value) in written else value._ebb_read(what)
        if isinstance(first, (Hidden, _Taken)):
            if what == "is_pinned":
                return False  # torch asks its memory
            if what in _ADDRESSES and not _is_inner(sys._getframe(1).f_code.co_filename):  # torch.compile asks for all tensors
                first._ebb_read(what)
        if what in _CONVERSIONS and arguments and isinstance(first, _Guard):
            with as_plain():
                empty = first.new_empty(0)
                converted = function(empty, *arguments[1:], **keywords)
            if isinstance(converted, torch.Tensor) and converted is not empty:
                if not _is_within(nn.Module._apply):
                    first._ebb_read(what)
                elif not isinstance(first, Stale):  # a model that is cast has an error of its own, which names what has changed
                    return without_value(_shape(first), converted.dtype, converted.device, _name(first))
        with as_plain():
            result = function(*arguments, **keywords)
        if what in _VIEWS and isinstance(first, _Guard):
            if _is_within(nn.Parameter.__new__):
                first._ebb_read("nn.Parameter")
            return _like(result, first)
        return result

    def __repr__(self) -> str:  # of a DTensor, which shows its local tensor
        return self._ebb_text() or super().__repr__()

    def _ebb_text(self) -> str:
        return ""

    def _ebb_read(self, what: str) -> None:
        raise NotImplementedError

    def _ebb_write(self, what: str) -> None:
        self._ebb_read(what)


class Hidden(_Guard):
    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self, memo) if self._ebb_shows() else super().__deepcopy__(memo)  # type: ignore[misc]

    def _ebb_shows(self) -> bool:
        """Whether it shows its value from here on, and has its own class again."""
        owner = _owner(self)
        return owner is not None and _parameter(self) is self and owner.brings_in(_name(self))

    def _ebb_text(self) -> str:
        name = _name(self)
        if self._ebb_shows():
            return ""
        return f"<'{name}', {list(_shape(self))}, shows its value only while its unit runs: engine.gather('{name}')>"

    def _ebb_read(self, what: str) -> None:
        name = _name(self)
        if self._ebb_shows():
            return
        if _owner(self) is None:
            raise Error(
                f"'{name}' is read by {what} after its engine was closed,{_where()}, and has no value: save before close(), or call "
                "close(keep_values=True)"
            )
        _refuse(
            self, f"'{name}' is read by {what} outside of its unit,{_where()}, where it has no value. For a copy or a log call "
            f"engine.gather('{name}') or engine.state_dict(), on every rank, and for another model with an engine engine.copy_parameters_from(). "
            "If the loss or another module needs it, name it in resident=, give initialize an example, a function that returns the loss, or make "
            "the modules that use it one unit (units=). Resize, parametrize and parallelize the model before ebb.initialize"
        )

    def _ebb_write(self, what: str) -> None:
        name = _name(self)
        if self._ebb_shows():
            return  # the engine's own look at writes has an error for it
        if _owner(self) is None:
            raise Error(
                f"'{name}' has no memory to write to, because its engine was closed: load_state_dict(values, assign=True) gives the model values"
            )
        _refuse(
            self, f"the trainer's own code has written to '{name}', by {what},{_where()}, but the engine does not see that: set it with "
            "engine.write(name, tensor), between steps and on every rank"
        )


class Stale(_Guard):
    __slots__ = ()

    def _ebb_read(self, what: str) -> None:
        owner = _owner(self)
        if owner is not None and not owner.makes_current():
            raise Error(
                f"'{_name(self)}' is read by {what} before the model's forward,{_where()}, and still has the value of the forward before: read "
                "it in the thread that made the engine, or after the forward"
            )

    def _ebb_write(self, what: str) -> None:
        """The engine's own look at writes has an error for it."""


class _Taken(_Guard):
    __slots__ = ()

    def _ebb_text(self) -> str:
        return f"<the gradient of '{_name(self)}', which the engine has>"

    def _ebb_read(self, what: str) -> None:
        _refuse_gradient(self, f"read by {what}")

    def _ebb_write(self, what: str) -> None:
        _refuse_gradient(self, f"changed by {what}")


class Copied(_Guard):
    __slots__ = ()

    def _ebb_read(self, what: str) -> None:
        """It has its values."""

    def _ebb_write(self, what: str) -> None:
        raise Error(f"a copy of masters is changed by {what},{_where()}, but the engine does not see that: engine.write(name, tensor) sets a master")


@functools.cache
def guarded(kind: type, guard: type[_Guard]) -> type:
    """The class of a parameter of the class `kind` that `guard` answers for. It has the name of `kind`, for code that asks for names."""
    body = {"__slots__": (), "__module__": kind.__module__, "__qualname__": kind.__qualname__, "_ebb_kind": kind}
    return type(kind)(kind.__name__, (guard, kind), body)


def kind_of(parameter: torch.Tensor) -> type:
    """Its class while it shows a value."""
    return getattr(type(parameter), "_ebb_kind", type(parameter))


@contextlib.contextmanager
def as_shown(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Within it the parameters may be given other memory and be read. Afterwards they are as before. Those that show their values when they are
    read do so from here on: a read within would have them shown, and what is put back afterwards would hide them."""
    parameters = list(parameters)
    for one in parameters:
        if isinstance(one, Hidden):
            one._ebb_shows()
    before = [(parameter, type(parameter)) for parameter in parameters]
    for parameter, _ in before:
        parameter.__class__ = kind_of(parameter)
    held = [local_of(parameter).data for parameter, _ in before]
    try:
        yield
    finally:
        for (parameter, kind), tensor in zip(before, held):
            set_local(parameter, tensor)
            parameter.__class__ = kind


def _like(view: torch.Tensor, of: torch.Tensor, guard: type[_Guard] | None = None) -> torch.Tensor:
    """Makes `view` one that the same guard answers for. Nodes of autograd remain."""
    if type(view) is torch.Tensor:
        guard = guard or next(kind for kind in type(of).__mro__ if kind in (Hidden, Stale, _Taken, Copied))
        view.__class__ = guarded(torch.Tensor, guard)
        view._ebb_of = _parameter(of)
    return view


def _parameter(value: torch.Tensor) -> nn.Parameter:
    return getattr(value, "_ebb_of", value)


def _name(value: torch.Tensor) -> str:
    parameter = _parameter(value)
    return getattr(parameter, "_ebb_name", None) or getattr(parameter, "_ebb_closed", "a parameter")


def _owner(value: torch.Tensor) -> Owner | None:
    """None: it was closed."""
    name = getattr(_parameter(value), "_ebb_name", None)
    return name.owner() if isinstance(name, Name) else None


def advice_of(value: torch.Tensor) -> str:
    owner = _owner(value)
    return owner.advice if owner is not None else ""


def _shape(value: torch.Tensor) -> torch.Size:
    with as_plain():
        return value.shape


def _of_property(function: Any, what: str, one: Any, *value: Any) -> Any:
    of = function.__self__.__name__
    if of in VIEW_PROPERTIES and what == "__get__" and isinstance(one, Hidden) and one._ebb_shows():
        return function(one)
    with as_plain():
        if of == "grad" and _parameter(one) is one and one.grad is None and _is_taken(one):
            if what == "__get__":
                return _like(one.detach(), one, _Taken)
            if what == "__delete__" or value[0] is None:
                _refuse_gradient(one, "removed")
        result = function(one, *value)
        if of == "data" and what == "__set__" and _owner(one) is None:
            one.__class__ = kind_of(one)  # after close() the trainer's own code may give values again
    return _like(result, one) if what == "__get__" and of in VIEW_PROPERTIES else result


def _is_taken(parameter: torch.Tensor) -> bool:
    owner = _owner(parameter)
    return owner is not None and owner.has_taken(parameter._ebb_name)


def _refuse_gradient(value: torch.Tensor, done: str) -> None:
    name = _name(value)
    if not _is_taken(_parameter(value)):
        raise Error(f"the gradient of '{name}' is {done} after its step,{_where()}: the engine has used it, and keeps it no longer")
    _refuse(
        value, f"the gradient of '{name}' is {done} after the backward of its unit,{_where()}, in which the engine has taken it. Change a "
        "gradient in a hook, p.register_hook, or name the parameter in resident=, so that its gradient is in `.grad` until step(). Set "
        "\"gradient_clipping\" in the configuration to clip; engine.report().gradient_norm is the norm; engine.zero_grad() drops the gradients of "
        "all parameters"
    )


def _refuse(value: torch.Tensor, text: str) -> None:
    """Raises. An error within a step, perhaps of this rank alone, ends the step on every rank."""
    error, owner = Error(text + advice_of(value)), _owner(value)
    if owner is not None:
        owner.fail(error)
    raise error


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def _is_within(function: Any) -> bool:
    return any(frame.f_code is function.__code__ for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(2)), 6))


def _where() -> str:
    frame = next((frame for frame in reversed(traceback.extract_stack()) if not _is_inner(frame.filename)), None)
    return f" at {frame.filename}:{frame.lineno}" if frame else ""


def _is_inner(path: str) -> bool:
    return "/torch/" in path or path.startswith(_OF_EBB) or path.startswith(_OF_PYTHON) and "site-packages" not in path


def without_value(shape: torch.Size, dtype: torch.dtype, device: torch.device, name: str) -> torch.Tensor:
    """A tensor that has a shape alone. Torch gives each way to its memory an error of ours: operators, storages, DLPack, scripts, torch.vmap,
    nested tensors, and whatever shares the memory."""
    one = torch.empty((), dtype=dtype, device=device)
    _forbid(memory_of(one), text_of_no_value(name))
    return one.expand(shape)


def text_of_no_value(name: str) -> str:
    return (
        f"'{name}' {_NO_VALUE}, nor has a view of it: it has a value while its unit runs, and none after close(). Keep a clone() in the unit's "
        f"forward, or call engine.gather('{name}') on every rank; if the loss needs it, name it in resident="
    )


def hide_memory(tensors: Iterable[torch.Tensor], texts: Iterable[str]) -> None:
    """What shares the memory of `tensors` is an error from here on, with a torch that can take that back."""
    if _allow is not None:
        for tensor, text in zip(tensors, texts):
            _forbid(memory_of(tensor), text)


def show_memory(tensors: Iterable[torch.Tensor]) -> None:
    if _allow is not None:
        for tensor in tensors:
            _allow(memory_of(tensor))


_forbid = torch._C._set_storage_data_ptr_access_error_msg
_allow = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)  # torch 2.6 has none


def has_value(tensor: torch.Tensor) -> bool:
    try:
        with as_plain():
            local_of(tensor).data_ptr()
    except RuntimeError as error:
        return not is_of_no_value(error)
    return True


def is_of_no_value(error: RuntimeError) -> bool:
    return _NO_VALUE in str(error)


memory_of = torch._C._storage_address  # of a tensor with or without values: equal where two share memory
