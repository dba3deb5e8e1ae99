"""A torch module as the engine's model: units, parameters with their initial values, and the order of visits."""

from __future__ import annotations

import ctypes
import json
import math
import re
from ctypes import byref, c_int32, c_int64
from pathlib import Path
from typing import Any, Mapping, Union

import torch
from torch import nn

from . import _library, saving
from ._library import Error, check, check_id, library
from ._order import Order
from ._tensors import NUMBER_OF_DTYPE
from ._units import Unit

Config = Union[str, Path, Mapping[str, Any]]


def config_text(config: Config) -> str:
    """The configuration as JSON text. `config` is a dict, a path, or text that begins with a brace."""
    if isinstance(config, Mapping):
        return json.dumps(_without_infinity(config))
    text = str(config)
    return text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8-sig")


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
    enabled = lambda kind: settings.get(kind, {}).get("enabled") is True
    return torch.bfloat16 if enabled("bf16") else torch.float16 if enabled("fp16") else torch.float32


def tier_of_activations(settings: Mapping[str, Any]) -> str:
    """Where what forward saves for backward is kept: "device", "cpu" or "nvme"."""
    in_ram = settings.get("activation_checkpointing", {}).get("cpu_checkpointing")
    return settings.get("ebb", {}).get("offload_activations") or ("cpu" if in_ram else "device")


def dtype_function(model: nn.Module, settings: Mapping[str, Any]):
    """Returns the dtype in which a parameter is computed. If the model has several types and the configured one is among them, each
    parameter keeps its own: for example fp32 for a router in a bf16 model. Bytes stay bytes."""
    computed = compute_dtype(settings)
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    keeps = computed in kinds
    return lambda parameter: parameter.dtype if parameter.dtype in NUMBER_OF_DTYPE and (keeps or parameter.dtype == torch.uint8) else computed


def group_function(groups: Mapping[str, str] | None):
    """`groups`: for the name of a group a pattern for re.search. A parameter is in the first group whose pattern fits its name."""
    patterns = [(group, re.compile(pattern)) for group, pattern in (groups or {}).items()]
    return lambda name: next((group for group, pattern in patterns if pattern.search(name)), "")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) and value >= 0 for value in values)


class Files:
    """Finds the tensor of safetensors files that has a parameter's values, by any name of the parameter."""

    def __init__(self, path: str, model: nn.Module):
        self.path = path
        self.names = self._names(Path(path))
        self.headers: dict[Path, tuple[dict[str, Any], int]] = {}
        self.buffers = {name: self._read(name, list(tensor.shape)) for name, tensor in saving.buffers(model).items()}
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(id(parameter), []).append(name)

    def of(self, parameter: nn.Parameter) -> str:
        aliases = self.aliases[id(parameter)]
        found = [name for name in aliases if name in self.names]
        if not found:
            raise Error(f"'{self.path}' has no tensor '{aliases[0]}'", "NOT_FOUND")
        for other in found[1:]:
            if not self._are_same(found[0], other):
                raise Error(f"'{found[0]}' and '{other}' are one parameter, and differ in '{self.path}'", "INVALID_ARGUMENT")
        return found[0]

    def _are_same(self, name: str, other: str) -> bool:
        (path, begin, entry), (other_path, other_begin, other_entry) = self._find(name), self._find(other)
        begins, ends = zip(entry.pop("data_offsets"), other_entry.pop("data_offsets"))
        if entry != other_entry or ends[0] - begins[0] != ends[1] - begins[1]:
            return False
        with path.open("rb") as file, other_path.open("rb") as other_file:
            file.seek(begin + begins[0])
            other_file.seek(other_begin + begins[1])
            piece = 4 << 20
            return all(
                file.read(min(piece, ends[0] - at)) == other_file.read(min(piece, ends[0] - at)) for at in range(begins[0], ends[0], piece)
            )

    def _find(self, name: str) -> tuple[Path, int, dict[str, Any]]:
        """The file of a tensor, where its data begin, and the tensor's entry in the header."""
        path = self.names[name]
        if path not in self.headers:
            self.headers[path] = self._header(path)
        header, begin = self.headers[path]
        try:
            entry = dict(header[name])
        except (LookupError, TypeError, ValueError):
            raise Error(f"'{path}' lacks '{name}', which the index has for it", "INVALID_ARGUMENT") from None
        offsets, shape = entry.get("data_offsets"), entry.get("shape")
        if not (
            _are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1] and _are_sizes(shape) and isinstance(entry.get("dtype"), str)
        ):
            raise Error(f"'{path}' does not say what '{name}' is", "INVALID_ARGUMENT")
        return path, begin, entry

    def _read(self, name: str, shape: list[int]) -> torch.Tensor:
        if name not in self.names:
            raise Error(f"'{self.path}' has no buffer '{name}'", "NOT_FOUND")
        path, start, entry = self._find(name)
        if entry["shape"] != shape:
            raise Error(f"buffer '{name}' has the shape {shape}, and in '{self.path}' {entry['shape']}", "INVALID_ARGUMENT")
        if entry["dtype"] not in saving.DTYPE_OF_FORMAT:
            raise Error(f"buffer '{name}' is {entry['dtype']} in '{self.path}', which is not supported", "UNIMPLEMENTED")
        values = torch.empty(shape, dtype=saving.DTYPE_OF_FORMAT[entry["dtype"]], device="cpu")
        first, last = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + first)
            if last - first != values.nbytes or file.readinto(values.view(-1).view(torch.uint8).numpy()) != values.nbytes:
                raise Error(f"'{path}' is not a whole safetensors file", "INVALID_ARGUMENT")
        return values

    def load_buffers(self, model: nn.Module) -> None:
        """Loads persistent buffers. Every rank has them whole."""
        for name, tensor in saving.keys(model):
            if name in self.buffers:
                tensor.copy_(self.buffers[name])

    @staticmethod
    def _names(path: Path) -> dict[str, Path]:
        """For the name of each tensor the file that has it."""
        if path.is_dir():
            index, path = path / "model.safetensors.index.json", path / "model.safetensors"
            if index.exists() and not path.exists():
                try:
                    return {name: index.parent / file for name, file in json.loads(index.read_text())["weight_map"].items()}
                except (ValueError, LookupError, TypeError, AttributeError):
                    raise Error(f"'{index}' is not an index of a model's files", "INVALID_ARGUMENT") from None
        return dict.fromkeys(Files._header(path)[0].keys() - {"__metadata__"}, path)

    @staticmethod
    def _header(path: Path) -> tuple[dict[str, Any], int]:
        """The header of a file, and where the data begin."""
        if not path.exists():
            raise Error(f"there is no '{path}'", "NOT_FOUND")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                return dict(json.loads(file.read(size if size < path.stat().st_size else 0))), 8 + size
            except (TypeError, ValueError):
                raise Error(f"'{path}' is not a whole safetensors file", "INVALID_ARGUMENT") from None


class Model:
    """The handle of an ebb_model, and the memory or files that have its values until the engine is made."""

    def __init__(self, units: list[Unit], order: Order, group_of, dtype_of, files: Files | None = None, has_values: bool = True):
        self.handle = library.ebb_model_create()
        self.kept: list[Any] = []
        self.first_id: list[int] = []
        for unit in units:
            check_id(library.ebb_model_add_unit(self.handle, unit.name.encode(), unit.keep_whole))
            ids = [self._add(unit, name, one, group_of, dtype_of, files, has_values) for name, one in zip(unit.names, unit.parameters)]
            self.first_id.append(ids[0])
        visits, events = structs_of(order)
        for visit in visits:
            check_id(library.ebb_model_add_visit(self.handle, byref(visit)))
        check(library.ebb_model_set_order(self.handle, events, len(events)))

    def __del__(self) -> None:
        library.ebb_model_destroy(self.handle)

    def _add(self, unit: Unit, name: str, parameter: nn.Parameter, group_of, dtype_of, files: Files | None, has_values: bool) -> int:
        shape = (c_int64 * max(parameter.dim(), 1))(*parameter.shape)
        given = _library.Parameter(
            trainable=parameter.requires_grad, name=name.encode(), group=group_of(name).encode(), shape=shape, dimensions=parameter.dim(),
            has_dtype=1, dtype=NUMBER_OF_DTYPE[dtype_of(parameter)],
        )
        if files is not None:
            given.file, given.tensor = files.path.encode(), files.of(parameter).encode()
        elif has_values:
            if parameter.is_meta:
                raise Error(f"parameter '{name}' is on the meta device: give initialize the folder of its values, weights=", "INVALID_ARGUMENT")
            values = parameter.detach().to("cpu")
            if values.dtype not in NUMBER_OF_DTYPE:
                values = values.float()
            values = values.contiguous()
            given.source, given.source_dtype = values.data_ptr(), NUMBER_OF_DTYPE[values.dtype]
            self.kept.append(values)
        self.kept.append(shape)
        return check_id(library.ebb_model_add_parameter(self.handle, unit.index, byref(given)))

    def plan(self, config: str, world: int) -> str:
        return _library.text_of(library.ebb_plan, self.handle, world, config.encode())

    def predict_memory(self, config: str, world: int) -> list:
        return _library.rows_of(_library.MemoryRow, library.ebb_predict_memory, self.handle, world, config.encode())


def structs_of(order: Order) -> tuple[Any, Any]:
    visits = [_library.Visit(unit=visit.unit, forward=visit.forward, backward=visit.backward, gradients=visit.gradients) for visit in order.visits]
    events = [_library.Event(*event) for event in order.events]
    return (_library.Visit * len(visits))(*visits), (_library.Event * len(events))(*events)


class Views:
    """Addresses and dtypes of a unit's parameters."""

    def __init__(self, handle: int, unit: Unit):
        count = c_int32()
        rows = (_library.View * len(unit.parameters))()
        check(library.ebb_engine_views(handle, unit.index, rows, len(rows), byref(count)))
        self.rows = list(rows)
