"""Which parameters are gathered together.

A unit is a member of the outermost ModuleList or Sequential that has more than one member with parameters. Every other module that
owns parameters joins its neighbours in the order of registration. Modules that share a parameter become one unit. If a module with
units inside it owns a parameter, the parameter is resident: kept whole, and always readable."""

from __future__ import annotations

import re
from typing import Callable, Iterable, Sequence, Union

import torch
from torch import nn

from ._blocks import block_of, is_dtensor
from ._hidden import kind_of
from ._library import Error

UnitsArgument = Union[None, Callable[[str, nn.Module], bool], Sequence[Union[str, nn.Module]]]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Unit:
    """`modules`: a visit begins with the forward of one of these. `names`: the names of the parameters in named_parameters()."""

    def __init__(self, name: str, modules: list[nn.Module], keep_whole: bool = False):
        self.name = name
        self.modules = modules
        self.keep_whole = keep_whole
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self.trainable: list[bool] = []  # at ebb.initialize: a loop may freeze parameters later, and unfreeze them
        self.index = -1

    def __repr__(self) -> str:
        return f"<unit {self.name}>"


def _members(model: nn.Module, units: UnitsArgument) -> list[tuple[str, nn.Module]]:
    if callable(units):
        chosen: Callable[[str, nn.Module], bool] = units
    elif units is not None:
        wanted = list(units)
        chosen = lambda name, module: any(
            module is one if isinstance(one, nn.Module) else one in (name, type(module).__name__) for one in wanted
        )
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def walk(name: str, module: nn.Module) -> None:
        members = [(child_name, child) for child_name, child in module._modules.items() if child is not None]
        with_parameters = [child for _, child in members if any(True for _ in child.parameters())]
        lists_units = units is None and isinstance(module, (nn.ModuleList, nn.Sequential)) and len(with_parameters) > 1
        for child_name, child in members:
            path = f"{name}.{child_name}" if name else child_name
            if id(child) in seen:
                continue
            seen.add(id(child))
            is_unit = any(child is one for one in with_parameters) and (lists_units if units is None else chosen(path, child))
            if is_unit:
                found.append((path, child))
            else:
                walk(path, child)

    walk("", model)
    # Several units may share a module that is in a list of its own, too. It is no unit within these.
    inside = {id(inner) for _, module in found for inner in module.modules() if inner is not module}
    return [(name, module) for name, module in found if id(module) not in inside]


def units_with(model: nn.Module, whole: Sequence[nn.Module]) -> list[nn.Module]:
    """The default units, except that what is in a module of `whole` is in one unit."""
    inside = {id(inner) for module in whole for inner in module.modules()}
    return [*whole, *(module for _, module in _members(model, None) if id(module) not in inside)]


def entries(module: nn.Module) -> list[nn.Module]:
    """The modules that are called in place of `module`, which may be a list of modules."""
    if not isinstance(module, _CONTAINERS):
        return [module]
    return [entry for child in module.children() for entry in entries(child)]


def owners(module: nn.Module) -> list[nn.Module]:
    """The modules inside `module` that own parameters themselves."""
    return [one for one in module.modules() if any(parameter is not None for parameter in one._parameters.values())]


def divide(model: nn.Module, units: UnitsArgument = None, resident: Iterable[str] = ()) -> list[Unit]:
    """The units of `model` in registration order. `resident`: names of parameters, or patterns of re.fullmatch.

    Errors name the parameter that cannot be trained because of its type, or the name in `resident` that fits no parameter."""
    members = _members(model, units)
    of_module: dict[int, Unit] = {}
    divided: list[Unit] = []
    shared: list[tuple[Unit, Unit]] = []  # units that have a module in common
    for path, module in members:
        unit = Unit(path, entries(module))
        for inner in module.modules():
            first = of_module.setdefault(id(inner), unit)
            if first is not unit and any(parameter is not None for parameter in inner._parameters.values()):
                shared.append((first, unit))
    has_units_inside = {id(one) for one in model.modules() if any(id(inner) in of_module for inner in one.modules())}

    residents: list[Unit] = []
    names_of = {id(parameter): name for name, parameter in model.named_parameters()}
    patterns = [re.compile(pattern) for pattern in resident]
    for pattern in patterns:
        if not any(pattern.fullmatch(name) for name in names_of.values()):
            raise Error(f"resident: no parameter is called '{pattern.pattern}'", "NOT_FOUND")

    group: Unit | None = None
    unit_of: dict[int, Unit] = {}
    merged: dict[Unit, Unit] = {}

    def root(unit: Unit) -> Unit:
        while unit in merged:
            unit = merged[unit]
        return unit

    for path, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        unit = of_module.get(id(module))
        if unit is not None:
            if unit not in divided:
                divided.append(unit)
            group = None
        if not own:
            continue
        is_resident = unit is None and (id(module) in has_units_inside or isinstance(module, _CONTAINERS))
        if unit is None and not is_resident:
            if group is None:
                group = Unit(path, [])
                divided.append(group)
            elif path:
                group.name += "+" + path
            group.modules.append(module)
            unit = group
        for parameter in own:
            name = names_of[id(parameter)]
            _check_parameter(name, parameter)
            if is_resident or any(pattern.fullmatch(name) for pattern in patterns):
                if id(parameter) not in unit_of:
                    kept = Unit(name, [], keep_whole=True)
                    residents.append(kept)
                    unit_of[id(parameter)] = kept
                    kept.names.append(name)
                    kept.parameters.append(parameter)
                continue
            there = unit_of.get(id(parameter))
            if there is not None and there.keep_whole:
                continue
            if there is None:
                unit_of[id(parameter)] = unit
                unit.names.append(name)
                unit.parameters.append(parameter)
            elif root(there) is not root(unit):
                merged[root(unit)] = root(there)

    for one, other in shared:
        if root(one) is not root(other):
            merged[root(other)] = root(one)

    for unit in divided:
        into = root(unit)
        if into is not unit:
            into.modules += [module for module in unit.modules if not any(module is one for one in into.modules)]
            into.names += unit.names
            into.parameters += unit.parameters
            into.name += "+" + unit.name
    result = residents + [unit for unit in divided if unit not in merged and unit.parameters]
    taken: set[str] = set()
    for index, unit in enumerate(result):
        unit.index = index
        unit.trainable = [parameter.requires_grad for parameter in unit.parameters]
        parts = unit.name.split("+")
        if len(parts) > 4:
            unit.name = f"{parts[0]}+...+{parts[-1]}"
        while unit.name in taken or not unit.name:
            unit.name = f"{unit.name or type(model).__name__}#{index}"
        taken.add(unit.name)
    if not result:
        raise Error(f"{type(model).__name__} has no parameters", "INVALID_ARGUMENT")
    return result


def registration_order(model: nn.Module, units: list[Unit]) -> list[int]:
    """Units in the order in which the model registers their modules. A unit in several places comes once for each place."""
    of_entry = {id(module): unit.index for unit in units for module in unit.modules}
    order: list[int] = [unit.index for unit in units if unit.keep_whole]
    for _, module in model.named_modules():
        index = of_entry.get(id(module))
        if index is not None and (not order or order[-1] != index):
            order.append(index)
    visited = set(order)
    return order + [unit.index for unit in units if unit.index not in visited]


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise Error(f"parameter '{name}' of a lazy module has no shape yet: call the model once before ebb.initialize", "INVALID_ARGUMENT")
    kind = kind_of(parameter.data)
    if is_dtensor(parameter):
        block_of(name, parameter)
    elif kind not in (torch.Tensor, nn.Parameter) and not parameter.is_meta:
        raise Error(f"parameter '{name}' is a {kind.__name__}: tensor subclasses are not sharded", "UNIMPLEMENTED")
    if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8):
        if parameter.is_complex():
            advice = "Give a complex one as real numbers: nn.Parameter(torch.view_as_real(values)), and torch.view_as_complex() of it in forward"
        else:
            advice = "Give a frozen parameter of another type as bytes, with view(torch.uint8)"
        raise Error(
            f"parameter '{name}' is {parameter.dtype}: only floating-point numbers of 16, 32 and 64 bits and bytes (torch.uint8) can be "
            f"sharded. {advice}", "UNIMPLEMENTED"
        )
    if parameter.is_inference():
        raise Error(f"parameter '{name}' was made under torch.inference_mode(): torch cannot train it", "INVALID_ARGUMENT")
    if parameter.numel() == 0:
        raise Error(f"parameter '{name}' has no elements", "INVALID_ARGUMENT")
