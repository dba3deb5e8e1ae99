"""The world of this process: its rank, and its engines, which are closed when the process exits."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import weakref
from ctypes import byref, c_void_p
from typing import Iterator, NamedTuple

import torch

from . import _library
from ._fixed import refuse_wrappers
from ._library import check, library
from ._tensors import Memory
from .optimizer import refuse_clipping, refuse_other_optimizers


class World(NamedTuple):
    """The number of this rank and the number of ranks, of all hosts and of this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int


_world: tuple[int, World] | None = None
_process = os.getpid()  # that has opened the world
memories: weakref.WeakSet[Memory] = weakref.WeakSet()  # of open engines


def open_world() -> tuple[int, World]:
    global _world, _process
    if _world is None:
        _process = os.getpid()
        handle = c_void_p()
        with _port_beside_torch():
            check(library.ebb_world_open(None, byref(handle)))
        facts = _library.WorldFacts()
        check(library.ebb_world_describe(handle, byref(facts)))
        _world = (handle.value, World(facts.rank, facts.size, facts.local_rank, facts.local_size))
        atexit.register(_close_all)
        refuse_other_optimizers()
        refuse_clipping()
        refuse_wrappers()
    return _world


def world() -> World:
    """The world that torchrun, mpirun or srun has started; without a launcher one rank. Waits until all ranks have connected."""
    return open_world()[1]


def is_open() -> bool:
    return _world is not None


def meet() -> World:
    """world(). For ranks that mpirun or srun has started, it sets the environment variables that torch and accelerate read."""
    of = world()
    if of.size == 1 or "RANK" in os.environ:
        return of
    os.environ.update(RANK=str(of.rank), WORLD_SIZE=str(of.size), LOCAL_RANK=str(of.local_rank), LOCAL_WORLD_SIZE=str(of.local_size))
    if of.local_size == of.size:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    return of


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def _port_beside_torch() -> Iterator[None]:
    """If torch.distributed has made its group before, it listens at MASTER_PORT. The ranks then meet at a port that rank 0 finds. Ranks of
    torchrun meet elsewhere."""
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not group or torch.distributed.get_world_size() == 1 or os.environ.get("TORCHELASTIC_RUN_ID"):
        yield
        return
    port = [free_port() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(port, src=0)
    before = os.environ.get("MASTER_PORT")
    os.environ["MASTER_PORT"] = str(port[0])
    try:
        yield
    finally:
        if before is not None:
            os.environ["MASTER_PORT"] = before


def _close_all() -> None:
    """Runs at exit. If an exception ends this process, the other ranks get an error. An exception in a forked child does not do that."""
    if _world is None or os.getpid() != _process:
        return
    error = getattr(sys, "last_value", None)
    if error is not None and _world[1].size > 1:
        library.ebb_world_fail(_world[0], f"rank {_world[1].rank} has ended: {error}".encode()[:400])
    for memory in list(memories):
        memory.close()
