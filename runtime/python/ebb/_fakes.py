"""Tensors without values (fake tensors) for a forward that only shows what the model does, and for no step.

Whatever the forward keeps outside of the model outlives it: functools.lru_cache, a dict or an attribute of a class, with masks and tables
of angles. So parameters and the batch alone have no values, and what is made of sizes and of buffers is real. If a cache has got a tensor
without values all the same, it gets its old contents back, or is emptied if they are not known. Where that cannot be done, the first operator
that takes the tensor raises an error."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
import traceback
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any, Callable, Iterable, Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from ._blocks import is_dtensor, local_of, with_local
from ._library import Error

ARRAY_BYTES_MAX = 16 << 20  # of a buffer or array that is copied; larger buffers get no values
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)  # not their subclasses, whose methods may do more
ITEMS_MAX = 10_000  # of a container whose contents are kept: a larger one is a data set
_LEAVES = (str, bytes, int, float, complex, type(None), torch.Tensor, types.ModuleType)
_NOT_THE_USERS = {"torch", "numpy", "ebb", *sys.stdlib_module_names}


class Fakes(FakeTensorMode):
    """Makes tensors without values. While it is entered, all new tensors are such."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.has_ended = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if self.has_ended:
            kept = next(one for one in tree_leaves((arguments, keywords or {})) if type(one) is FakeTensor and one.fake_mode is self)
            raise Error(
                f"{_holder_of(kept)} keeps a tensor without values from the forward that shows the order of units: call the model once before "
                "ebb.initialize, so that a real tensor is kept, or keep the tensor in an attribute of a module"
            )
        return super().__torch_dispatch__(function, types, arguments, keywords or {})

    def end(self) -> None:
        """Takes those that are still alive out of the caches that hold them."""
        self.has_ended = True
        if self._alive():
            gc.collect()
            _take_out(self._alive())

    def _alive(self) -> list[torch.Tensor]:
        return [one for one in gc.get_objects() if type(one) is FakeTensor and one.fake_mode is self]


def has_fake(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor)
    if depth > 3 or isinstance(value, (str, bytes, int, float, type(None), nn.Module, type, types.ModuleType)):
        return False
    if isinstance(value, (list, tuple, set, deque)):
        return any(has_fake(item, depth + 1) for item in value)
    inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return isinstance(inner, dict) and any(has_fake(item, depth + 1) for item in inner.values())


@contextlib.contextmanager
def classes_as_they_were(model: nn.Module) -> Iterator[None]:
    """Afterwards, variables of the model's classes, of their Python modules and of those that these import from, and containers in these
    variables, that have got a tensor without values have their old values. So does the cache of torch's parametrizations, whose tensors may
    also be without gradients."""
    before = [(place, dict(vars(place))) for place in namespaces_of(model)]
    reached = within([values for _, values in before])
    contents = [(one, one.copy()) for one in reached if type(one) in CONTAINERS and len(one) <= ITEMS_MAX]
    of_parametrizations, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = of_parametrizations
        for container, old in contents:
            if has_fake(container):
                give_back(container, old)
        for place, values in before:
            for name, value in list(vars(place).items()):
                if value is not values.get(name) and has_fake(value):
                    setattr(place, name, values[name]) if name in values else delattr(place, name)


def give_back(container: Any, before: Any) -> None:
    """The contents of before."""
    if not _are_same(container, before):  # a configuration of diffusers refuses changes
        container.clear()
        container.extend(before) if isinstance(container, (list, deque)) else container.update(before)


def _are_same(container: Any, before: Any) -> bool:
    if isinstance(container, set):
        return container == before
    one, other = ([*values, *values.values()] if isinstance(values, dict) else values for values in (container, before))
    return list(map(id, one)) == list(map(id, other))


def namespaces_of(model: nn.Module) -> list[Any]:
    """The user's classes of the model, their Python modules, and the modules that these import from."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__ if is_the_users(kind.__module__)}
    own = {kind.__module__ for kind in classes if kind.__module__ in sys.modules}
    imported = {_origin(value) for name in own for value in vars(sys.modules[name]).values()}
    return [*classes, *(sys.modules[name] for name in own | imported if is_the_users(name) and name in sys.modules)]


def is_the_users(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] not in _NOT_THE_USERS


def _origin(value: Any) -> Any:
    """The name of the Python module that a variable comes from."""
    return value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) if callable(value) else None


def within(namespaces: list[Any], is_open: Callable[[Any], bool] = lambda value: True) -> Iterator[Any]:
    """What the variables of `namespaces` hold, in containers, in attributes, and in the closures of functions too; inner values last. Objects
    are looked into if `is_open`."""
    seen: set[int] = set()
    values = namespaces
    for depth in range(6):
        inner: list[Any] = []
        for value in values:
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            if depth > 0:
                yield value
            if is_open(value):
                inner += _held_by(value)
        values = inner


def _held_by(value: Any) -> Iterable[Any]:
    if type(value).__module__.partition(".")[0] == "ebb":
        return ()
    if isinstance(value, (dict, types.MappingProxyType)):
        items = dict.items(value) if isinstance(value, dict) else value.items()  # a subclass may import something for each item
        return [one for name, one in items if name != "__builtins__"] if len(items) <= ITEMS_MAX else ()
    if isinstance(value, (list, tuple, set, deque)):
        return value if len(value) <= ITEMS_MAX else ()
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]  # empty ones have no contents
    if isinstance(value, functools._lru_cache_wrapper):  # its results; or a dict has them, which is its own
        held = gc.get_referents(value)
        return [one for inner in held for one in (inner.values() if isinstance(inner, dict) else (inner,)) if not isinstance(one, type)]
    attributes = getattr(value, "__dict__", None)
    own = list(attributes.values()) if isinstance(attributes, dict) else []  # not those of a class
    return own + list(slots_of(value).values())


def slots_of(value: Any) -> dict[str, Any]:
    if not is_the_users(type(value).__module__):
        return {}
    names = [name for kind in type(value).__mro__ for name, one in vars(kind).items() if isinstance(one, types.MemberDescriptorType)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


@contextlib.contextmanager
def faked(
    model: nn.Module, device: torch.device, mode: Fakes, dtype_of: Callable[[torch.Tensor], torch.dtype] = lambda tensor: tensor.dtype,
    keeps_buffers: bool = False,
) -> Iterator[dict[int, torch.Tensor]]:
    """The model with parameters and buffers without values; with `keeps_buffers`, buffers have their values, as far as they are real and
    small, and have the same values again afterwards. A tensor that is used in several places becomes one."""
    fakes: dict[int, torch.Tensor] = {}
    places: list[tuple[dict, str, Any]] = []
    kept: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if keeps_buffers and not isinstance(tensor, nn.Parameter) and tensor.device == device and tensor.nbytes <= ARRAY_BYTES_MAX:
            kept.append((tensor, tensor._version, tensor.clone()))
            return tensor.detach()  # autograd must not give the buffer itself a node
        with mode:
            made = torch.empty(local_of(tensor).shape, dtype=dtype_of(tensor), device=device)
        if is_dtensor(tensor):
            made = with_local(tensor, made)
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    if any(map(is_dtensor, model.parameters())):
        # What a layer says to the other tensor ranks has shapes alone, too.
        importlib.import_module("torch.distributed._tools.fake_collectives")
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in list(table.items()):
                    if tensor is not None:
                        places.append((table, name, tensor))
                        if id(tensor) not in fakes:
                            fakes[id(tensor)] = stand_in(tensor)
                        table[name] = fakes[id(tensor)]
        yield fakes
    finally:
        for table, name, tensor in places:
            table[name] = tensor
        with torch.no_grad():
            for tensor, version, value in kept:
                if tensor._version != version:
                    tensor.copy_(value)


def _take_out(values: list[Any], depth: int = 0, takes_keys: bool = True) -> None:
    """Empties the caches of functools that hold `values`, and takes the keys with `values` out of dicts. Variables stay as they are, because
    their old values are not known, and so do lists, because the items behind would get other indices."""
    ids = set(map(id, values))
    tuples, containers = [], []  # of them
    for holder in _holders(values):
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
        elif isinstance(holder, tuple):
            tuples.append(holder)
        elif isinstance(holder, (list, deque)):
            containers.append(holder)
        elif isinstance(holder, dict):
            if any(_is_namespace(holder, owner) for owner in _holders([holder])):
                continue
            containers.append(holder)
            if takes_keys:
                for key in [key for key, value in holder.items() if id(value) in ids]:
                    del holder[key]
        elif isinstance(holder, set):
            holder.difference_update([value for value in holder if id(value) in ids])
    if depth < 3:
        if tuples:
            _take_out(tuples, depth + 1, takes_keys)
        if containers:
            _take_out(containers, depth + 1, takes_keys=False)


def _holder_of(value: Any) -> str:
    """In words: the variable, function or object that holds `value`, perhaps in containers."""
    inner, name, last = [value], "", ""
    held = {id(value)}  # and what holds it, so far
    for _ in range(6):
        following = []
        for holder in gc.get_referrers(*inner):
            if holder is inner or isinstance(holder, (types.FrameType, types.TracebackType)):
                continue
            if isinstance(holder, dict):
                name = next((key for key, one in holder.items() if id(one) in held and isinstance(key, str)), name)
                module = sys.modules.get(holder.get("__name__", ""))
                if module is not None and vars(module) is holder:
                    return f"'{name}' of {module.__name__}"
            elif isinstance(holder, functools._lru_cache_wrapper):
                return f"the cache of {holder.__module__}.{holder.__qualname__}()"
            elif isinstance(holder, types.FunctionType):
                if found := _variable_of(holder, held, name):
                    return f"{found} of {holder.__module__}.{holder.__qualname__}()"
                continue
            elif isinstance(holder, type):
                return f"'{name}' of the class {holder.__qualname__}"
            elif frame := getattr(holder, "gi_frame", None) or getattr(holder, "cr_frame", None) or getattr(holder, "ag_frame", None):
                last = last or _local_in([frame], held)
                continue
            elif type(holder).__module__ not in sys.stdlib_module_names:
                name = _attribute_of(holder, held, name)
                return f"{f'the attribute {name!r} of ' if name else ''}an object of {type(holder).__qualname__}"
            following.append(holder)
        inner = following
        held.update(map(id, inner))
    return last or _local_in([frame for frame, _ in traceback.walk_stack(None)][::-1], held) or "something outside of the model"


def _variable_of(function: types.FunctionType, held: set[int], name: str) -> str:
    """`name`: of the attribute of the function, if it is one that holds."""
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    named = [*zip(function.__code__.co_freevars, function.__closure__ or ()), *zip(parameters[len(parameters) - len(defaults):], defaults)]
    found = next((variable for variable, one in [*named, *(function.__kwdefaults__ or {}).items()] if id(one) in held), "")
    return f"the variable '{found}'" if found else f"the attribute '{name}'" if id(vars(function)) in held else ""


def _attribute_of(holder: Any, held: set[int], name: str) -> str:
    if isinstance(holder, nn.Module) and any(id(table) in held for table in (holder._buffers, holder._parameters)):
        return name
    attributes = {**slots_of(holder), **getattr(holder, "__dict__", {})}
    return next((attribute for attribute, one in attributes.items() if id(one) in held), "")


def _local_in(frames: list[types.FrameType], held: set[int]) -> str:
    for frame in frames:
        for variable, one in frame.f_locals.items():
            if id(one) in held:
                return f"the variable '{variable}' of {frame.f_globals.get('__name__')}.{frame.f_code.co_name}()"
    return ""


def _holders(values: list[Any]) -> Iterable[Any]:
    frames = (types.FrameType, types.GeneratorType, types.TracebackType)
    return [one for one in gc.get_referrers(*values) if one is not values and not isinstance(one, frames)]


def _is_namespace(names: dict, owner: Any) -> bool:
    return isinstance(owner, (type, types.ModuleType)) or getattr(owner, "__dict__", None) is names
