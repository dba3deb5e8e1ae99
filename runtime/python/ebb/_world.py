"""The world of this process: which rank it is, and its engines, which end with it."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, NamedTuple

from . import _library
from ._library import check, library
from .optimizer import refuse_other_optimizers

if TYPE_CHECKING:
    from .engine import Engine


class World(NamedTuple):
    """Which rank this is, and how many there are; on this host, and in all."""

    rank: int
    size: int
    local_rank: int
    local_size: int


_world: tuple[int, World] | None = None
_process = os.getpid()  # that has opened the world
engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


def open_world() -> tuple[int, World]:
    global _world, _process
    if _world is None:
        _process = os.getpid()
        handle = c_void_p()
        check(library.ebb_world_open(None, byref(handle)))
        facts = _library.WorldFacts()
        check(library.ebb_world_describe(handle, byref(facts)))
        _world = (handle.value, World(facts.rank, facts.size, facts.local_rank, facts.local_size))
        atexit.register(_close_all)
        refuse_other_optimizers()
    return _world


def world() -> World:
    """As torchrun, mpirun or srun has started this process; without a launcher one rank. Waits until all ranks are there."""
    return open_world()[1]


def _close_all() -> None:
    """At exit. Other ranks hear of an exception that ends this one, but not of one that ends a forked child."""
    if _world is None or os.getpid() != _process:
        return
    error = getattr(sys, "last_value", None)
    if error is not None and _world[1].size > 1:
        library.ebb_world_fail(_world[0], f"rank {_world[1].rank} has ended: {error}".encode()[:400])
    for engine in list(engines):
        engine._memory.close()
