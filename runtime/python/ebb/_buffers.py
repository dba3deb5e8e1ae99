"""Checkpoints also have what model.state_dict() has beside parameters: persistent buffers, such as the running statistics of BatchNorm, and what
a module's own code gives, such as extra states and the state of 4-bit weights."""

from __future__ import annotations

import io
import logging
import pickle
from typing import Any, Iterable

import torch
from torch import nn

from ._entries import Entries

log = logging.getLogger("ebb")
_BYTES_MAX = 16 << 20  # a checkpoint's manifest has at most 64 MiB


def _others(entries: Entries) -> dict[str, Any]:
    return {key: value for key, value in entries.of_names().items() if not isinstance(value, nn.Parameter)}


def _named(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _bytes_of(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def read(saved: bytes) -> Any:
    with torch.serialization.safe_globals([io.BytesIO]):  # of Transformer Engine
        return torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)


def packed(of_model: Entries) -> bytes:
    """The entries of model.state_dict() that are not parameters, the smallest first, as far as they fit."""
    entries = {key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value for key, value in _others(of_model).items()}
    unreadable = [key for key, value in entries.items() if not isinstance(value, torch.Tensor) and not _is_readable(value)]
    if unreadable and of_model.state.world.rank == 0:
        log.warning("the checkpoint is saved without extra states that torch.load(weights_only=True) does not read: %s", _named(unreadable))
    size_of = lambda value: value.nbytes if isinstance(value, torch.Tensor) else len(_bytes_of(value))
    sizes = {key: size_of(value) for key, value in entries.items() if key not in unreadable}
    total, fitting = 0, []
    for key in sorted(sizes, key=sizes.__getitem__):
        total += sizes[key]
        if total <= _BYTES_MAX:
            fitting.append(key)
    if total > _BYTES_MAX and of_model.state.world.rank == 0:
        log.warning("the checkpoint is saved without the model's buffers, because they have %d bytes, more than %d: %s. Save them yourself, "
                    "for example with save_pretrained()", total, _BYTES_MAX, _named(sizes.keys() - set(fitting)))
    return _bytes_of({key: entries[key] for key in entries if key in fitting}) if fitting else b""


def _is_readable(value: Any) -> bool:
    try:
        read(_bytes_of(value))
    except (pickle.UnpicklingError, pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def set_to(of_model: Entries, saved: bytes) -> None:
    """Collective: sets the entries to those that were packed."""
    values, entries = read(saved) if saved else {}, _others(of_model)
    buffers = {id(buffer) for buffer in of_model.state.model.buffers()}
    # An old checkpoint has buffers under the paths of their modules, which hooks of state_dict() may change.
    key_of = {id(entry): key for key, entry in entries.items()}
    for path, buffer in of_model.state.model.named_buffers(remove_duplicate=False):
        if path in values and path not in entries and id(buffer) in key_of:
            values.setdefault(key_of[id(buffer)], values.pop(path))
    fits = lambda key, entry: id(entry) not in buffers or values[key].shape == entry.shape
    fit = {key for key, entry in entries.items() if key in values and fits(key, entry)}
    if fit:  # the others too, because a module's own code may want all of its entries
        of_model.load({key: values[key] if key in fit else entry for key, entry in entries.items()}, completes=True)
    for what, keys in (("keep their values, because the checkpoint lacks them or has another shape", entries.keys() - fit),
                       ("of the checkpoint are not in the model", values.keys() - entries.keys())):
        if keys:
            log.warning("%d buffers %s: %s", len(keys), what, _named(keys))
