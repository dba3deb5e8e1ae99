"""Saves the buffers of a model, which its engine does not know, in a checkpoint: after the caller's own bytes.

    | the caller's bytes | torch.save of the buffers | its length: 8 bytes, little-endian | _END |
"""

from __future__ import annotations

import io
import logging

import torch
from torch import nn

from . import saving

log = logging.getLogger("ebb")
_END = b"\0ebb buffers"
_BYTES_MAX = 16 << 20  # a manifest has at most 64 MiB


def of_model(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in saving.keys(model) if not isinstance(tensor, nn.Parameter)}


def added(model: nn.Module, trainer: bytes, of_this_rank: bytes) -> tuple[bytes, bytes]:
    """The caller's bytes of a save, with the buffers that model.state_dict() has. Each rank has its own."""
    buffers = of_model(model)
    size = sum(tensor.nbytes for tensor in buffers.values())
    if size > _BYTES_MAX:
        log.warning("buffers are not saved, because they have %d bytes, more than %d; save_pretrained() writes them", size, _BYTES_MAX)
    if not buffers or size > _BYTES_MAX:
        return trainer, of_this_rank
    stream = io.BytesIO()
    torch.save({key: tensor.detach().cpu().clone() for key, tensor in buffers.items()}, stream)
    end = stream.getvalue() + stream.tell().to_bytes(8, "little") + _END
    return trainer + end, of_this_rank + end


def taken(model: nn.Module, trainer: bytes, of_this_rank: bytes) -> tuple[bytes, bytes]:
    """Sets the buffers to this rank's, or else to rank 0's. Returns the caller's bytes."""
    (trainer, of_rank_0), (of_this_rank, own) = (_split(saved) for saved in (trainer, of_this_rank))
    saved, buffers = own or of_rank_0, of_model(model)
    kept = [key for key, tensor in buffers.items() if key not in saved or saved[key].shape != tensor.shape]
    if kept:
        log.warning("the checkpoint lacks buffers, which keep their values: %s", ", ".join(kept[:5]) + (", ..." if kept[5:] else ""))
    with torch.no_grad():
        for key in buffers.keys() - set(kept):
            buffers[key].copy_(saved[key])
    return trainer, of_this_rank


def _split(saved: bytes) -> tuple[bytes, dict[str, torch.Tensor]]:
    if not saved.endswith(_END):
        return saved, {}
    end = len(saved) - len(_END) - 8
    begin = end - int.from_bytes(saved[end : end + 8], "little")
    return saved[:begin], torch.load(io.BytesIO(saved[begin:end]), weights_only=True)
