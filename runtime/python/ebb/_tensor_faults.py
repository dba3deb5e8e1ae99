"""Exceptions on tensor ranks. A rank that raises one alone leaves the others of its data rank in a collective of torch, which waits for it. Then no
rank can go on, and all get an error at once:

  rank 1   ValueError in its loss      says so in torch's store; waits a moment for its tensor ranks; closes gloo's connections
  rank 0   waits in an all-reduce      gets torch's error, finds rank 1's words in the store, and ends the step with them
  2, 3     wait in Ebb's exchange      get rank 1's words from the verdict

If all tensor ranks of a data rank raise the same at the same place, torch's collectives are still in step: the step ends, and training may go on."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
from datetime import timedelta
from typing import Iterator

import torch

from ._library import Error, MeshFacts, error_text, library
from ._tensors import Memory

_SECONDS = 5  # for the tensor ranks of a data rank to raise the same; what is later costs the run
_engines = itertools.count()
_OF_TORCH = re.compile(r"gloo|^Dist\w*Error|ProcessGroup")


class TensorFaults:
    """Of one engine, which has several tensor ranks."""

    def __init__(self, memory: Memory, rank: int, mesh: MeshFacts):
        self.memory = memory
        self.place = f"rank {rank} (data rank {mesh.data_rank}, tensor rank {mesh.tensor_rank})"
        self.data_rank, self.tensor_rank, self.tensor_ranks = mesh.data_rank, mesh.tensor_rank, mesh.tensor_ranks
        self.engine = next(_engines)
        self.alike = 0  # exceptions that all tensor ranks of this data rank have raised
        self.ended = ""  # why the engine cannot go on

    def check(self) -> None:
        """Raises if a rank has ended the run."""
        if not self.ended:
            with contextlib.suppress(RuntimeError):  # the rank with the store has gone, which other calls find
                self.ended = self._first()
        if self.ended:
            raise Error(self.ended, "ABORTED")

    def text_of(self, error: str, place: int) -> str:
        """The words that the step ends with after `error` on this rank, which has opened `place` scopes. Waits for the other tensor ranks."""
        if self.ended:
            return self.ended
        self.ended = error
        with contextlib.suppress(RuntimeError):
            if is_torchs(error):
                self.ended = self._first() or self._first(self._of_a_death() or f"{self.place}: {error}")
            elif self._is_alike(f"{place} {error.partition(':')[0]}"):  # the exception's class; its text may name the rank
                self.alike += 1
                self.ended = ""
                return error
            else:
                self.ended = self._first(
                    error if error.startswith("the engine has failed") else
                    f"{self.place} has left its tensor ranks alone: {error}. Torch's collectives cannot go on after that: begin again from a checkpoint"
                )
        _close_connections()
        return self.ended

    def _first(self, text: str = "") -> str:
        """The words of the first rank that has ended the run; `text` if there is none."""
        store, key = torchs_store(), f"ebb/{self.engine}/ended"
        if text:
            return store.compare_set(key, "", text).decode()
        return store.get(key).decode() if store.check([key]) else ""

    def _of_a_death(self) -> str:
        """After torch has lost a connection: the engine's words if a rank has died. The step is over."""
        library.ebb_step_drop(self.memory.handle)
        code = library.ebb_engine_agree(self.memory.handle, b"torch has lost a connection to another rank")
        text = error_text() if code else ""
        return text if re.search("has died|has ended|cannot be reached", text) else ""

    def _is_alike(self, what: str) -> bool:
        store, key = torchs_store(), f"ebb/{self.engine}/{self.data_rank}/{self.alike}"
        names = [f"{key}/{rank}" for rank in range(self.tensor_ranks)]
        store.set(names[self.tensor_rank], what)
        try:
            store.wait(names, timedelta(seconds=_SECONDS))
        except RuntimeError:
            return False
        return len({store.get(name) for name in names}) == 1


def is_torchs(error: str) -> bool:
    """Whether these are the words of a collective of torch that has failed."""
    return _OF_TORCH.search(error) is not None


def reword(error: BaseException, text: str) -> None:
    """Of a collective of torch in forward, whose hooks cannot raise another exception."""
    if isinstance(error, RuntimeError) and is_torchs(f"{type(error).__name__}: {error}"):
        error.args = (f"{text} [{error}]",)


def torchs_store() -> torch.distributed.Store:
    return torch.distributed.distributed_c10d._get_default_store()


def _close_connections() -> None:
    """Of gloo, so that ranks which wait for this one get an error. Torch has no call for it: abort() and shutdown() of a gloo group wake nobody."""
    for number in _descriptors_of_gloo():
        with contextlib.suppress(OSError), _as_socket(number) as connection:
            connection.shutdown(socket.SHUT_RDWR)


def _as_socket(number: int) -> socket.socket:
    return socket.socket(fileno=os.dup(number))


def _listens(number: int) -> bool | None:
    """None: it is no socket."""
    with contextlib.suppress(OSError), _as_socket(number) as one:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
    return None


def _descriptors_of_gloo() -> Iterator[int]:
    """Gloo's connections. A loop of gloo waits with epoll for these and for one socket that listens, and the data of each are an address. Other
    users of epoll have the descriptor there (CPython and libuv, as in torch's store), or do not listen with the same epoll."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                continue
            with open(f"/proc/self/fdinfo/{name}") as facts:
                found = re.findall(r"^tfd:\s*(\d+) events:\s*\w+ data:\s*(\w+)", facts.read(), re.MULTILINE)
            if any(int(data, 16) & 0xFFFFFFFF == int(number) for number, data in found):
                continue
            listens = {int(number): _listens(int(number)) for number, _ in found}
            if list(listens.values()).count(True) == 1:
                yield from (number for number, one in listens.items() if one is False)  # gloo ends the process if it cannot listen
