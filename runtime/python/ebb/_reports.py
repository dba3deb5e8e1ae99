"""What an engine reports: the numbers of a step, and bytes that are held, moved and sent."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from . import _library
from ._library import STATES, TIERS


class Report(NamedTuple):
    """The last step. `loss`: the mean of the losses given to engine.backward(), over micro-batches and ranks. `gradient_norm`: the
    global L2 norm over all ranks, before clipping. `applied` is False if an overflow skipped the step; `step` counts such a step too."""

    step: int
    applied: bool
    skipped_steps: int
    loss: float
    gradient_norm: float
    loss_scale: float
    learning_rate: float


class MemoryRow(NamedTuple):
    """Bytes of this rank: `state` is "parameter", "master", "gradient", ...; `tier` "device", "cpu" or "nvme"."""

    state: str
    tier: str
    predicted: int
    current: int
    peak: int


class TrafficRow(NamedTuple):
    """Bytes that the last step has moved between a tier and the one above it."""

    state: str
    tier: str
    direction: str
    predicted: int
    bytes: int


class CommunicationRow(NamedTuple):
    """Bytes that the last step's collectives of one kind have moved from or to other ranks."""

    operation: str
    predicted: int
    bytes: int


def memory_rows(call: Callable[..., int], *arguments: Any) -> list[MemoryRow]:
    rows = _library.rows_of(_library.MemoryRow, call, *arguments)
    return [MemoryRow(STATES[row.state], TIERS[row.tier], row.predicted, row.current, row.peak) for row in rows]
