"""How the tensors of a file become the tensors of a model of transformers: by its own table of renames, stacked experts and divided projections."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any, Callable, Iterable, Mapping

import torch
from torch import nn

from ._library import Error

Shape = Callable[[str], tuple[list[int], torch.dtype]]  # of a tensor of the file
Read = Callable[[str], torch.Tensor]


class Conversion:
    """Tensors of the file that are converted together, such as a layer's experts. It holds their values for as long as they are wanted."""

    def __init__(self, converter: Any, first: str, model: nn.Module):
        self.converter = converter
        self.first = first  # the model's name of the first tensor that is made
        self.model = model
        self.given: list[tuple[str, str]] = []  # the pattern and the name of each tensor of the file

    def run(self, tensor_of: Callable[[str], Any]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.given:
            converter.add_tensor(self.first, name, pattern, tensor_of(name))
        made = converter.convert(self.first, model=self.model, config=self.model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}

    def shapes(self, shape_of: Shape) -> dict[str, list[int]]:
        def empty(name: str) -> torch.Tensor:
            shape, dtype = shape_of(name)
            return torch.empty(shape, dtype=dtype, device="meta")

        try:
            return {key: list(value.shape) for key, value in self.run(empty).items()}
        except Exception as error:
            names = ", ".join(f"'{name}'" for _, name in self.given)
            raise Error(f"transformers cannot convert {names} to '{self.first}': {error}", "INVALID_ARGUMENT") from error


class Sources:
    """For each entry of a model the tensor of the file that it is, or the conversion that makes it."""

    def __init__(self, model: nn.Module, entries: Mapping[str, Any], names: Iterable[str], shape_of: Shape):
        self.tensors: dict[str, str] = {}
        self.conversions: dict[str, Conversion] = {}
        self.shapes: dict[str, list[int]] = {}  # of what is converted
        self.left_out: list[str] = []  # tensors that the model does not have
        rename, converter_of, order = _table(model, entries)
        by_first: dict[str, Conversion] = {}
        for name in sorted(names, key=order):
            key, pattern = rename(name)
            if key not in entries:
                self.left_out.append(name)
            elif pattern is None:
                self.tensors.setdefault(key, name)
            else:
                by_first.setdefault(key, Conversion(converter_of[pattern], key, model)).given.append((pattern, name))
        for conversion in by_first.values():
            for key, shape in conversion.shapes(shape_of).items():
                if key in entries:
                    self.conversions[key], self.shapes[key] = conversion, shape

    def __contains__(self, key: str) -> bool:
        return key in self.conversions or key in self.tensors


def _table(model: nn.Module, entries: Mapping[str, Any]) -> tuple[Callable[[str], tuple[str, str | None]], dict[str, Any], Any]:
    """A function that gives a tensor's name in the model and the pattern of its converter; the converters by their patterns; and the key by which
    the file's names are sorted, so that experts come in the order of their numbers."""
    none = (lambda name: (name, None)), {}, None
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return none
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # before 5.0 files had the model's names
        return none
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, entries)
        if key not in entries and name in entries:
            return rename_source_key(name, [], [], model.base_model_prefix, entries)
        return key, pattern

    return rename, {pattern: converter for converter in converters for pattern in converter.source_patterns}, dot_natural_key


class Converted:
    """Values that are converted when they are asked for. It holds those of two conversions, because a unit's parameters come one after the other
    and threads ask for the end of one beside the begin of the next."""

    def __init__(self, sources: Sources, read: Read):
        self.sources = sources
        self.read = read
        self.held: dict[int, dict[str, torch.Tensor]] = {}
        self.lock = threading.Lock()

    def values(self, key: str) -> torch.Tensor:
        conversion = self.sources.conversions[key]
        with self.lock:
            made = self.held.pop(id(conversion), None)
            if made is None:
                while len(self.held) > 1:
                    del self.held[next(iter(self.held))]
                made = conversion.run(lambda name: lambda: self.read(name))
            self.held[id(conversion)] = made
        return made[key]
