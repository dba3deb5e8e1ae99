"""A torch module as the engine's model: units, parameters with their initial values, and the order of visits."""

from __future__ import annotations

import ctypes
import json
import math
import re
from ctypes import byref, c_int64
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, NamedTuple, Union

import torch
from torch import nn

from . import _library
from ._blocks import Block, block_of, local_of
from ._files import Files
from ._given_values import GivenValues
from ._library import Error, check, check_id, library
from ._tensors import NUMBER_OF_DTYPE
from ._units import Unit
from ._visits import Order

Config = Union[str, Path, Mapping[str, Any]]
Groups = Union[Mapping[str, Union[str, Iterable[str]]], Callable[[str], str]]


def config_text(config: Config) -> str:
    """The configuration as JSON text. `config` is a dict, a path, or text that begins with a brace."""
    if isinstance(config, Mapping):
        return json.dumps(_without_infinity(config))
    text = str(config)
    if text.lstrip().startswith("{"):
        return text
    try:
        return Path(text).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Error(f"'{text}' is not UTF-8, which JSON files must be: {error}", "INVALID_ARGUMENT") from None


def _without_infinity(value: Any) -> Any:
    """With text in place of infinity and NaN, which JSON does not have. Dicts for DeepSpeed have "steps_per_print": float("inf")."""
    if isinstance(value, Mapping):
        return {name: _without_infinity(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_infinity(element) for element in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def resolved(text: str, world: int) -> dict[str, Any]:
    return json.loads(_library.text_of(library.ebb_config_resolve, text.encode(), world))


def compute_dtype(settings: Mapping[str, Any]) -> torch.dtype:
    enabled = lambda kind: (settings.get(kind) or {}).get("enabled") is True
    return torch.bfloat16 if enabled("bf16") else torch.float16 if enabled("fp16") else torch.float32


def tier_of_activations(settings: Mapping[str, Any]) -> str:
    """Where what forward saves for backward is kept: "device", "cpu" or "nvme"."""
    in_ram = settings.get("activation_checkpointing", {}).get("cpu_checkpointing")
    return settings.get("ebb", {}).get("offload_activations") or ("cpu" if in_ram else "device")


def dtype_function(model: nn.Module, settings: Mapping[str, Any], of_config: bool = False):
    """Returns the dtype in which a parameter is computed. If the model has several types and the configured one is among them, each
    parameter keeps its own: for example fp32 for a router in a bf16 model. Bytes stay bytes. `of_config`: all others have the configured one."""
    computed = compute_dtype(settings)
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    keeps = computed in kinds and not of_config
    return lambda parameter: parameter.dtype if parameter.dtype in NUMBER_OF_DTYPE and (keeps or parameter.dtype == torch.uint8) else computed


def group_function(groups: Groups | None) -> Callable[[str], str]:
    """Returns the group of a parameter by its name; "": none. A parameter is in the first group whose pattern (re.search) or list has its name."""
    if callable(groups):
        return groups
    of_name: dict[str, str] = {}
    for group, names in (groups or {}).items():
        if not isinstance(names, str):
            of_name = {**dict.fromkeys(names, group), **of_name}
    patterns = [(group, re.compile(pattern)) for group, pattern in (groups or {}).items() if isinstance(pattern, str)]
    return lambda name: of_name.get(name) or next((group for group, pattern in patterns if pattern.search(name)), "")


class Said(NamedTuple):
    """What is said of each parameter beside its values."""

    group: Callable[[str], str]  # by its name
    dtype: Callable[[nn.Parameter], torch.dtype]
    matrix_update: Callable[[nn.Parameter], int]
    block: Callable[[str, nn.Parameter], Block | None] = block_of


class Model:
    """The handle of an ebb_model, and the memory or files that have its values until the engine is made."""

    def __init__(self, units: list[Unit], order: Order, said: Said, files: Files | GivenValues | None = None, has_values: bool = True):
        self.handle = library.ebb_model_create()
        self.kept: list[Any] = []
        self.failure: BaseException | None = None  # of reading values
        self.first_id: list[int] = []
        for unit in units:
            check_id(library.ebb_model_add_unit(self.handle, unit.name.encode(), unit.keep_whole))
            ids = [self._add(unit, name, one, said, files, has_values) for name, one in zip(unit.names, unit.parameters)]
            self.first_id.append(ids[0])
        visits, events = structs_of(order)
        for visit in visits:
            check_id(library.ebb_model_add_visit(self.handle, byref(visit)))
        check(library.ebb_model_set_order(self.handle, events, len(events)))

    def __del__(self) -> None:
        library.ebb_model_destroy(self.handle)

    def _add(self, unit: Unit, name: str, parameter: nn.Parameter, said: Said, files: Files | GivenValues | None, has_values: bool) -> int:
        shape = (c_int64 * max(parameter.dim(), 1))(*parameter.shape)
        given = _library.Parameter(
            trainable=parameter.requires_grad, name=name.encode(), group=said.group(name).encode(), shape=shape, dimensions=parameter.dim(),
            has_dtype=1, dtype=NUMBER_OF_DTYPE[said.dtype(parameter)], matrix_update=said.matrix_update(parameter),
        )
        block = said.block(name, parameter)
        if block is not None:
            self._split(given, block)
        if files is not None:
            tensor, is_converted = files.of(parameter)
            if is_converted:
                given.fill = self._converting(files, tensor)
            else:
                given.file, given.tensor = files.path.encode(), tensor.encode()
        elif has_values:
            if parameter.is_meta:
                raise Error(f"parameter '{name}' is on the meta device: give initialize the folder of its values, weights=", "INVALID_ARGUMENT")
            values = local_of(parameter).detach().to("cpu")
            if block is not None:
                given.block_rank, given.block_ranks = block.rank, len(block.sizes)
            if values.dtype not in NUMBER_OF_DTYPE:
                values = values.float()
            values = values.contiguous()
            given.source, given.source_dtype = values.data_ptr(), NUMBER_OF_DTYPE[values.dtype]
            self.kept.append(values)
        self.kept.append(shape)
        return check_id(library.ebb_model_add_parameter(self.handle, unit.index, byref(given)))

    def _split(self, given: _library.Parameter, block: Block) -> None:
        given.has_split, given.split_dimension = 1, block.dimension
        numbers = [sum(block.sizes) // block.parts] * block.parts if block.is_even else block.sizes
        kept = (c_int64 * len(numbers))(*numbers)
        self.kept.append(kept)
        if block.is_even:
            given.split_parts, given.split_part_count = kept, len(numbers)
        else:
            given.split_sizes, given.split_size_count = kept, len(numbers)

    def _converting(self, files: Files | GivenValues, key: str) -> Any:
        def fill(user, parameter, begin, end, numbers) -> int:
            try:
                values = files.converted.values(key).reshape(-1)[begin:end].float().contiguous()
            except BaseException as failure:
                self.failure = self.failure or failure
                return 1
            ctypes.memmove(numbers, values.data_ptr(), values.nbytes)
            return 0

        function = _library.FILL(fill)
        self.kept.append(function)
        return function

    def check(self, code: int) -> None:
        """Raises the error of the call that has asked for values."""
        if code != 0 and self.failure is not None:
            raise self.failure
        check(code)


def structs_of(order: Order) -> tuple[Any, Any]:
    visits = [_library.Visit(unit=visit.unit, forward=visit.forward, backward=visit.backward, gradients=visit.gradients) for visit in order.visits]
    events = [_library.Event(*event) for event in order.events]
    return (_library.Visit * len(visits))(*visits), (_library.Event * len(events))(*events)
