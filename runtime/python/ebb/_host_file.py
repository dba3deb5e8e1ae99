"""Values that the ranks of a host have together: a file without a name, in RAM or on a disk, which ends with the last process that has it open."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from typing import Any, Sequence

import torch
import torch.distributed as dist

from ._library import Error


def exchanged(given: Any) -> list[Any]:
    """Collective, by torch.distributed: what each rank has given, by rank."""
    of_all: list[Any] = [given]
    if dist.is_initialized() and dist.get_world_size() > 1:
        of_all = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, given)
    return of_all


def _host() -> str:
    """Equal for processes that see each other's files below /proc."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read() + os.readlink("/proc/self/ns/pid")


class HostFile:
    """The first rank of each host makes the file and writes to it, and the others map it."""

    def __init__(self, folder: str | None):
        """Collective. `folder`: of a disk; None: the file is in RAM."""
        self.folder = folder
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        hosts = exchanged(_host())
        first = hosts.index(hosts[self.rank])
        self.is_first = first == self.rank
        self.has_others = len(set(hosts)) > 1
        self.is_here = [host == hosts[self.rank] for host in hosts]
        self._end = 0
        self._failure: str | None = None  # of this rank's writes since agree()
        if self.is_first:
            self.file = self._made()
        path = exchanged(f"/proc/{os.getpid()}/fd/{self.file.fileno()}" if self.is_first else None)[first]
        if not self.is_first:
            self.file = open(path, "r+b", buffering=0)
        exchanged(None)  # no process ends before the others have opened its file

    def _made(self) -> Any:
        if self.folder is None:
            return os.fdopen(os.memfd_create("ebb-values", os.MFD_CLOEXEC), "r+b", buffering=0)
        os.makedirs(self.folder, exist_ok=True)
        return tempfile.TemporaryFile(dir=self.folder, prefix="ebb-values-", buffering=0)

    def reserve(self, count: int) -> int:
        """Where the next `count` bytes lie. Every rank makes the same calls."""
        begin = self._end
        self._end += math.ceil(count / mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return begin

    def put(self, begin: int, values: torch.Tensor) -> None:
        """Of the first rank. An error is raised by agree()."""
        data = memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy())
        try:
            if data:
                os.posix_fallocate(self.file.fileno(), begin, len(data))
            at = 0
            while at < len(data):
                at += os.pwrite(self.file.fileno(), data[at : at + (1 << 30)], begin + at)
        except OSError as error:
            where = f"the folder '{self.folder}'" if self.folder else "memory"
            self._failure = f"the values of a model do not fit into {where}: {error.strerror}, after {begin} bytes"

    def view(self, begin: int, shape: Sequence[int], dtype: torch.dtype, writes: bool) -> torch.Tensor:
        """The values. `writes`: what is written to the tensor is in the file; else it is seen by this process alone, until the tensor ends."""
        elements = math.prod(shape)
        if elements == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flags = mmap.MAP_SHARED if writes else mmap.MAP_PRIVATE
        mapped = mmap.mmap(self.file.fileno(), elements * dtype.itemsize, flags, offset=begin)
        return torch.frombuffer(mapped, dtype=dtype, count=elements).view(tuple(shape))

    def agree(self) -> None:
        """Collective: every rank sees what the others have written. Raises the error of the first rank that could not write, on every rank."""
        own, self._failure = self._failure, None
        failed = next((error for error in exchanged(own) if error is not None), None)
        if failed is not None:
            raise Error(failed, "RESOURCE_EXHAUSTED")


class HostValue:
    """The place of one tensor in a file."""

    def __init__(self, file: HostFile, value: torch.Tensor):
        """Collective. The values of rank 0 are taken."""
        value = value.detach().to("cpu")
        self.file, self.shape, self.dtype = file, value.shape, value.dtype
        self._begin = file.reserve(value.nbytes)
        self.put(value, source=0)

    def put(self, value: torch.Tensor, source: int, is_there: bool = False) -> None:
        """Collective: sets the values to those of rank `source`. `is_there`: on its host the file has them."""
        file = self.file
        if file.has_others:
            is_nccl = dist.get_backend() == "nccl"
            value = value.to(torch.device("cuda", torch.cuda.current_device())) if is_nccl else value.clone()
            dist.broadcast(value, src=source)
        if file.is_first and not (is_there and file.is_here[source]):
            file.put(self._begin, value.to("cpu"))

    def view(self, writes: bool = False) -> torch.Tensor:
        return self.file.view(self._begin, self.shape, self.dtype, writes)
