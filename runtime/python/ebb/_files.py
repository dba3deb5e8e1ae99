"""Safetensors files, or a folder of Hugging Face's, as the source of a model's values."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, Iterable, Mapping

import torch
from torch import nn

from ._conversions import Converted, Sources
from ._library import Error

log = logging.getLogger("ebb")
FORMAT_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}
_DTYPE_OF_FORMAT = {name: dtype for dtype, name in FORMAT_NAMES.items()}


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, int) and value >= 0 for value in values)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


class Files:
    """Finds the values of a model's entries, under the names of torch's own state_dict()."""

    def __init__(self, path: str, model: nn.Module):
        self.path = path
        self.files = self._names(Path(path))
        self.headers: dict[Path, tuple[dict[str, Any], int]] = {}
        entries = model.state_dict(keep_vars=True)
        self.sources = Sources(model, entries, self.files, self._shape_of)
        self.converted = Converted(self.sources, lambda name: self._read(name, None))
        self.aliases: dict[int, list[str]] = {}
        for key, entry in entries.items():
            if isinstance(entry, nn.Parameter):
                self.aliases.setdefault(id(entry), []).append(key)
        for name, parameter in model.named_parameters():
            if id(parameter) not in self.aliases:
                raise Error(f"'{name}' is no entry of state_dict(): its module saves it in its own way, which weights= cannot read", "UNIMPLEMENTED")
        self._check(model, entries)
        others = {key: entry for key, entry in entries.items() if not isinstance(entry, nn.Parameter) and key in self.sources}
        self.others = {key: self._other(key, entry) for key, entry in others.items()}  # persistent buffers and extra states, whole

    def _check(self, model: nn.Module, entries: Mapping[str, Any]) -> None:
        """Raises an error that names all tensors that are missing, and warns of those that the model does not have."""
        ignored = lambda pattern: [re.compile(one) for one in getattr(model, f"_keys_to_ignore_on_load_{pattern}", None) or ()]
        missing = [keys[0] for keys in self.aliases.values() if not any(key in self.sources for key in keys)]
        optional = ignored("missing") + [re.compile(r"(^|\.)_extra_state$")]
        others = [key for key, entry in entries.items() if not isinstance(entry, nn.Parameter) and key not in self.sources]
        needed = [key for key in others if not any(pattern.search(key) for pattern in optional)]
        known = ignored("unexpected") + [re.compile(r"rotary_emb\.inv_freq$"), re.compile(r"(^|\.)position_ids$")]
        left_out = [name for name in self.sources.left_out if not any(pattern.search(name) for pattern in known)]
        if missing or needed:
            lacks = [f"no {kind} {_quoted(names)}" for kind, names in (("tensor", missing), ("buffer", needed)) if names]
            has = f". The model has no {_quoted(left_out)}, which are there" if left_out else ""
            raise Error(f"'{self.path}' has {' and '.join(lacks)}{has}", "NOT_FOUND")
        kept = set(others) - set(needed)
        for what, names in (("has tensors that the model does not have", left_out), ("lacks these, which stay as they are", kept)):
            if names:
                log.warning("'%s' %s: %s", self.path, what, _quoted(sorted(names)))

    def of(self, parameter: nn.Parameter) -> tuple[str, bool]:
        """The name of a tensor in the files, or, with True, the parameter's name in the model, whose values are converted."""
        found = [key for key in self.aliases[id(parameter)] if key in self.sources]
        direct = [key for key in found if key in self.sources.tensors]
        for other in direct[1:]:
            names = self.sources.tensors[direct[0]], self.sources.tensors[other]
            if not self._are_same(*names):
                raise Error(f"{_quoted(names[:1])} and {_quoted(names[1:])} are one parameter, and differ in '{self.path}'", "INVALID_ARGUMENT")
        if direct:
            return self.sources.tensors[direct[0]], False
        if self.sources.shapes[found[0]] != list(parameter.shape):
            names = _quoted(name for _, name in self.sources.conversions[found[0]].given)
            shape = self.sources.shapes[found[0]]
            raise Error(f"'{found[0]}' has the shape {list(parameter.shape)}, and {names} of '{self.path}' give {shape}", "INVALID_ARGUMENT")
        return found[0], True

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
        path = self.files[name]
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

    def _shape_of(self, name: str) -> tuple[list[int], torch.dtype]:
        entry = self._find(name)[2]
        if entry["dtype"] not in _DTYPE_OF_FORMAT:
            raise Error(f"'{name}' is {entry['dtype']} in '{self.path}', which is not supported", "UNIMPLEMENTED")
        return entry["shape"], _DTYPE_OF_FORMAT[entry["dtype"]]

    def _read(self, name: str, shape: list[int] | None) -> torch.Tensor:
        there, dtype = self._shape_of(name)
        path, start, entry = self._find(name)
        if shape is not None and there != shape:
            raise Error(f"buffer '{name}' has the shape {shape}, and in '{self.path}' {there}", "INVALID_ARGUMENT")
        values = torch.empty(there, dtype=dtype, device="cpu")
        first, last = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(start + first)
            if last - first != values.nbytes or file.readinto(values.view(-1).view(torch.uint8).numpy()) != values.nbytes:
                raise Error(f"'{path}' is not a whole safetensors file", "INVALID_ARGUMENT")
        return values

    def _other(self, key: str, entry: Any) -> torch.Tensor:
        if key in self.sources.conversions:
            return self.converted.values(key)
        is_buffer = isinstance(entry, torch.Tensor) and not key.endswith("_extra_state")
        return self._read(self.sources.tensors[key], list(entry.shape) if is_buffer else None)

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
