"""A mapping as the source of a model's values."""

from __future__ import annotations

import logging
from typing import Any, Mapping

import torch
from torch import nn

from ._library import Error

log = logging.getLogger("ebb")


def _listed(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + (", ..." if len(names) > 5 else "")


class GivenValues:
    """Takes values by the names of torch's own state_dict(), as Files does. A tensor of the mapping is asked for when its values are needed."""

    def __init__(self, given: Mapping[str, Any], model: nn.Module):
        self._given = given
        self._last: tuple[str, torch.Tensor] | None = None
        self.converted = self
        entries = model.state_dict(keep_vars=True)
        self._key_of = {id(entry): key for key, entry in entries.items() if isinstance(entry, nn.Parameter) and key in given}
        missing = [name for name, one in model.named_parameters() if id(one) not in self._key_of]
        if missing:
            raise Error(f"values= has no {_listed(missing)}: it needs a tensor for each parameter, by the names of state_dict()", "NOT_FOUND")
        unknown = [key for key in given if key not in entries]
        if unknown:
            log.warning("values= has tensors that the model does not have: %s", _listed(unknown))
        for one in model.parameters():
            key = self._key_of[id(one)]
            shape = given[key].shape
            if shape != one.shape:
                raise Error(f"'{key}' has the shape {list(one.shape)}, and {list(shape)} in values=", "INVALID_ARGUMENT")
        self.others = {key: given[key] for key, entry in entries.items() if not isinstance(entry, nn.Parameter) and key in given}

    def of(self, parameter: nn.Parameter) -> tuple[str, bool]:
        return self._key_of[id(parameter)], True

    def values(self, key: str) -> torch.Tensor:
        last = self._last
        if last is None or last[0] != key:
            self._last = last = key, self._given[key].detach()
        return last[1]
