"""What a forward counts and collects outside of its modules' attributes, which the forward that only shows what the model does must leave as
it was: numbers, text and containers in objects that the modules hold, and in variables that the model's code names. Another thread may
meanwhile use other variables, such as the queue of a loader. Tensors that the forward writes to in place are the walk's (_order.py)."""

from __future__ import annotations

import array
import contextlib
import copy
import dis
import functools
import os
import sys
import threading
import types
from typing import Any, Iterator

from torch import nn

from ._fakes import ARRAY_BYTES_MAX, CONTAINERS, ITEMS_MAX, give_back, has_fake, is_the_users, slots_of, within

_PLAIN = (int, float, complex, str, bytes, type(None))


@contextlib.contextmanager
def counters_as_they_were(model: nn.Module) -> Iterator[None]:
    functions, variables = _code_of(model)
    classes = [kind for kind in {kind for module in model.modules() for kind in type(module).__mro__} if is_the_users(kind.__module__)]
    named = [[space[name] for name in names if name in space] for space, names in variables]
    roots = [functions, *named, *(dict(vars(place)) for place in (*classes, *model.modules()))]
    reached = list(within(roots, _is_open))
    contents = [(one, one.copy()) for one in reached if type(one) in CONTAINERS and len(one) <= ITEMS_MAX]
    arrays = [(one, copy.copy(one)) for one in reached if _is_array(one)]
    objects = [one for one in reached if _is_the_users_object(one)]
    spaces = [(vars(one), None) for one in [*functions, *objects] if hasattr(one, "__dict__")] + variables
    before = [(space, names, dict(space)) for space, names in spaces]
    slotted = [(one, slots_of(one)) for one in objects]
    of_classes = [(kind, dict(vars(kind))) for kind in classes]
    cells = [cell for one in reached if isinstance(one, types.FunctionType) for cell in one.__closure__ or () if cell != types.CellType()]
    nonlocals = [(cell, cell.cell_contents) for cell in cells if isinstance(cell.cell_contents, _PLAIN)]
    environment = dict(os.environ)
    try:
        yield
    finally:
        for name in {name for name, _ in environment.items() ^ os.environ.items()}:
            os.environ.pop(name) if name not in environment else os.environ.update({name: environment[name]})
        for one, old in arrays:
            one[slice(None) if isinstance(one, (bytearray, array.array)) else ...] = old
        for container, old in contents:
            give_back(container, old)
        for cell, old in nonlocals:
            if isinstance(cell.cell_contents, _PLAIN):
                cell.cell_contents = old
        for space, names, old in before:
            for name in _changed(space, old):
                if names is None or name in names:
                    if name in old:
                        space[name] = old[name]
                    else:
                        del space[name]
        for one, old in slotted:
            for name in _changed(slots_of(one), old):
                setattr(one, name, old[name]) if name in old else delattr(one, name)
        for kind, old in of_classes:
            for name in _changed(vars(kind), old):
                setattr(kind, name, old[name]) if name in old else delattr(kind, name)


def _changed(now: Any, before: dict[str, Any]) -> list[str]:
    return [
        name for name, value in now.items()
        if value is not before.get(name) and (isinstance(value, _PLAIN) and isinstance(before.get(name), _PLAIN) or has_fake(value))
    ]


def _is_the_users_object(value: Any) -> bool:
    kind = type(value)
    if kind in (types.SimpleNamespace, threading.local):
        return True
    is_theirs = is_the_users(kind.__module__) and not isinstance(value, (type, nn.Module, types.FunctionType))
    return is_theirs and (isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(value)))


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if isinstance(value, (bytearray, array.array)):
        return len(value) <= ITEMS_MAX
    return numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes <= ARRAY_BYTES_MAX and value.flags.writeable


def _is_open(value: Any) -> bool:
    return isinstance(value, (*CONTAINERS, tuple, types.FunctionType, functools._lru_cache_wrapper)) or _is_the_users_object(value)


def _code_of(model: nn.Module) -> tuple[list[types.FunctionType], list[tuple[dict[str, Any], set[str]]]]:
    """The functions of the user that the model's classes have, and that these name; and for each Python module the names in them."""
    waiting: list[Any] = list({kind for module in model.modules() for kind in type(module).__mro__})
    seen: set[int] = set()
    functions: list[types.FunctionType] = []
    spaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
    while waiting:
        value = waiting.pop()
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__func__", value)
        value = getattr(value, "__wrapped__", value)
        if id(value) in seen or not is_the_users(getattr(value, "__module__", None)):
            continue
        seen.add(id(value))
        if isinstance(value, type):
            waiting += vars(value).values()
        if not isinstance(value, types.FunctionType):
            continue
        functions.append(value)
        names, attributes = _names_in(value.__code__)
        imported = [one for name in names if isinstance(one := value.__globals__.get(name), types.ModuleType) and is_the_users(one.__name__)]
        for space, named in ((value.__globals__, names), *((vars(one), attributes) for one in imported)):
            spaces.setdefault(id(space), (space, set()))[1].update(named)
            waiting += [space[name] for name in named if callable(space.get(name))]
        waiting += [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType() and callable(cell.cell_contents)]
    return functions, list(spaces.values())


def _names_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Of global variables, and of all attributes too. In packages, which are large and have no loops of training, both are the second."""
    attributes = set(code.co_names)
    names = attributes
    if "site-packages" not in code.co_filename:
        names = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names, attributes = (mine | others for mine, others in zip((names, attributes), _names_in(inner)))
    return names, attributes
