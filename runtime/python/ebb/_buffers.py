"""Checkpoints also have the persistent buffers of the torch module, such as the running statistics of BatchNorm."""

from __future__ import annotations

import io
import logging

import torch
from torch import nn

from . import saving

log = logging.getLogger("ebb")
_BYTES_MAX = 16 << 20  # a checkpoint's manifest has at most 64 MiB


def packed(model: nn.Module, rank: int) -> bytes:
    """The buffers that model.state_dict() has."""
    buffers = saving.buffers(model)
    size = sum(tensor.nbytes for tensor in buffers.values())
    if size > _BYTES_MAX and rank == 0:
        log.warning("the checkpoint is saved without the model's buffers, because they have %d bytes, more than %d: save them yourself, "
                    "for example with save_pretrained()", size, _BYTES_MAX)
    if not buffers or size > _BYTES_MAX:
        return b""
    stream = io.BytesIO()
    torch.save({key: tensor.detach().cpu().clone() for key, tensor in buffers.items()}, stream)
    return stream.getvalue()


def set_to(model: nn.Module, saved: bytes) -> None:
    """Sets the buffers to those that were packed."""
    values = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True) if saved else {}
    buffers = saving.buffers(model)
    fit = {key for key, tensor in buffers.items() if key in values and values[key].shape == tensor.shape}
    with torch.no_grad():
        for key in fit:
            buffers[key].copy_(values[key])
    for what, keys in (("keep their values, because the checkpoint lacks them or has another shape", buffers.keys() - fit),
                       ("of the checkpoint are not in the model", values.keys() - buffers.keys())):
        if keys:
            log.warning("%d buffers %s: %s", len(keys), what, ", ".join(sorted(keys)[:5]) + (", ..." if len(keys) > 5 else ""))
