"""Torch tensors over the engine's memory, and what a parameter shows while another parameter uses that memory.

Only this file has code for CUDA: tensors are made with DLPack, because it has bf16, and the current stream is passed as a number."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
from typing import Sequence

import torch

from ._blocks import is_dtensor, local_of, set_local
from ._hidden import Hidden, Stale, advice_of, as_plain, guarded, hide_memory, kind_of, memory_of, show_memory, text_of_no_value, without_value
from ._library import Error, library

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}


class Memory:
    """The engine's handle. Tensors over its memory hold this object, so the memory is freed with the last of them."""

    def __init__(self, handle: int):
        self.handle = handle
        self.process = os.getpid()
        self.closed = False
        self.changed = ""  # a parameter whose values here the trainer's own code has changed; nothing undoes that

    def check_process(self) -> None:
        if os.getpid() != self.process:
            raise Error("this process was forked from the engine's process, and has no threads of the engine: call the engine in the parent process")

    def close(self) -> int:
        self.closed = True
        return library.ebb_engine_close(self.handle) if os.getpid() == self.process else 0

    def __del__(self) -> None:
        # A forked child has the memory, and none of the engine's threads.
        if os.getpid() == self.process:
            library.ebb_engine_destroy(self.handle)


def over(memory: Memory, address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor over `address`. It holds `memory`."""
    elements = torch.Size(shape).numel()
    if device.type == "cuda":
        return _from_dlpack(memory, address, shape, dtype, device)
    buffer = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    buffer.memory = memory
    return torch.frombuffer(buffer, dtype=dtype, count=elements).view(tuple(shape))


def current_stream(device: torch.device) -> int | None:
    """The handle for EngineOptions.compute_stream."""
    if device.type != "cuda":
        return None
    legacy = 1  # cudaStreamLegacy: the name of the stream whose handle is 0
    return torch.cuda.current_stream(device).cuda_stream or legacy


class Slots:
    """The parameters of one unit. They show their values while one of the unit's scopes is open. Otherwise they are hidden (_hidden.py), and
    have only a shape. Parameters that the engine keeps whole are always readable, in a copy, because an update may be writing to the engine's memory.

    The engine does not see writes of the trainer's own code to values that are shown. check() finds them, those through `.data` to sharded
    parameters only while it watches the values, in the first scopes and in two of 64."""

    def __init__(self, memory: Memory, names: list[str], parameters: list[torch.nn.Parameter], keep_whole: bool):
        self.memory = memory
        self.names = names
        self.parameters = parameters
        self.keep_whole = keep_whole
        self.kinds = [kind_of(parameter) for parameter in parameters]
        self.guards = [guarded(kind, Hidden) for kind in self.kinds]
        self.texts = [text_of_no_value(name) for name in names]
        self.views: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []  # of those that are kept whole
        self.bits: list[int] = []  # of the values as they came: of copies, and while they are watched of what a scope shows
        self.stays = False  # shown until the next step, although no scope is open
        self.scopes = 0
        self.lent: dict[int, tuple[torch.Tensor, type]] = {}  # whole values that parameters show for the caller, and their classes before
        self.places: tuple[list[int], ...] = ()  # where the parameters' memory is: hidden, and shown
        self.versions = [parameter._version for parameter in parameters]  # which an in-place operation counts, but not one through `.data`

    def place(self, views: list[torch.Tensor]) -> None:
        self.views = views
        # Made once, because the trainer's own code may have a view of one from before.
        self.hidden = self.hidden or [without_value(view.shape, view.dtype, view.device, name) for name, view in zip(self.names, views)]
        self.copies = [view.clone() for view in views] if self.keep_whole else []
        self.places = tuple(list(map(memory_of, tensors)) for tensors in (self.hidden, self.copies or views))
        self.show() if self.keep_whole else self.hide()

    def show(self) -> None:
        if self.keep_whole:
            self._copy()
        else:
            show_memory(self.views)
            self.scopes += 1
            if self.scopes <= 6 or self.scopes % 64 < 2:  # to look at each bit twice takes a device as long as a small batch
                self.bits = list(map(_bits_of, self.views))
        for parameter, kind, view in zip(self.parameters, self.kinds, self.copies or self.views):
            parameter.__class__ = kind
            set_local(parameter, view)

    def age(self) -> None:
        """The values that are shown are those before an update."""
        for parameter, kind in zip(self.parameters, self.kinds):
            parameter.__class__ = guarded(kind, Stale)

    def hide(self) -> None:
        if not self.keep_whole and not self.stays:
            self.conceal()

    def end_stay(self) -> None:
        if self.stays:
            self.check()
            self.stays = False
            self.conceal()

    def conceal(self) -> None:
        """Hides also what forward has kept of the values without a copy, such as a view for a penalty."""
        self.bits = []
        hide_memory(self.views, self.texts)
        with as_plain():
            for parameter, kind, hidden in zip(self.parameters, self.guards, self.hidden):
                set_local(parameter, hidden)
                parameter.__class__ = kind

    def check(self) -> None:
        """Raises if a parameter was written to after it was shown or hidden, and undoes the write unless it is `memory.changed`."""
        with as_plain():
            at = list(map(memory_of, map(local_of, self.parameters)))
            versions = list(map(_version_of, self.parameters))
        if at not in self.places or versions != self.versions:
            for i, place in enumerate(at):
                if i not in self.lent and (all(place != places[i] for places in self.places) or versions[i] != self.versions[i]):
                    self._refuse(i)
        for i, (value, bits) in enumerate(zip(self.copies or self.views, self.bits)):
            if _bits_of(value) != bits:
                self._refuse(i)

    def lend(self, i: int, value: torch.Tensor) -> None:
        """A parameter shows `value`, which the caller may change, until take_back(), or until its unit runs."""
        parameter = self.parameters[i]
        if is_dtensor(parameter):
            raise Error(f"'{self.names[i]}' is a DTensor, which shows this rank's block: engine.gather() has the whole, and engine.write() sets it", "UNIMPLEMENTED")
        self.lent[i] = value, type(parameter)
        parameter.__class__ = self.kinds[i]
        parameter.data = value

    def take_back(self, i: int) -> torch.Tensor:
        """The value that lend() gave, with what the caller has changed."""
        parameter = self.parameters[i]
        value, kind = self.lent.pop(i)
        with as_plain():
            if all(memory_of(parameter) != places[i] for places in self.places):
                value = parameter.data
            parameter.data = self.copies[i] if self.keep_whole else self.views[i] if self.stays else self.hidden[i]
            parameter.__class__ = kind
        self.versions[i] = parameter._version
        return value

    def _copy(self) -> None:
        for copied, view in zip(self.copies, self.views):
            copied.copy_(view)
        self.bits = [_bits_of(copied) for copied in self.copies]

    def _refuse(self, i: int) -> None:
        parameter, name = self.parameters[i], self.names[i]
        local = local_of(parameter)
        changes = [
            f"has the {of} {now} instead of {before}" for of, before, now in (
                ("shape", list(self.hidden[i].shape), list(local.shape)), ("data type", self.hidden[i].dtype, local.dtype),
                ("device", self.hidden[i].device, local.device),
            ) if now != before
        ]
        if self.views and memory_of(local) == memory_of(self.views[i]):
            self.memory.changed = name
        if self.keep_whole:
            self._copy()
        set_local(parameter, self.copies[i] if self.keep_whole else self.hidden[i])
        parameter.__class__ = self.kinds[i] if self.keep_whole else self.guards[i]
        self.versions[i] = parameter._version
        if changes:
            raise Error(
                f"the trainer's own code has changed '{name}', which {' and '.join(changes)}: resize, cast and move the model before "
                "ebb.initialize (the JSON chooses the data type, and device= the device)"
            )
        raise Error(
            f"the trainer's own code has written to '{name}', but the engine does not see that: "
            f"set it with engine.write(name, tensor), between steps and on every rank{advice_of(parameter)}"
        )


_version_of = operator.attrgetter("_version")  # map() with it is faster than a loop


def _bits_of(tensor: torch.Tensor) -> int:
    """A sum of a tensor's bits, which a write changes, also one that moves values."""
    bits = tensor.view(_integer(tensor.dtype))
    if bits.numel() <= _WEIGHTED_MAX:
        return int((bits.reshape(-1) * _odd_numbers(bits.numel(), bits.device)).sum())
    rows = bits.reshape(bits.shape[0], -1)
    return sum(int((sums * _odd_numbers(sums.numel(), bits.device)).sum()) for sums in (rows.sum(0), rows.sum(1)))


_WEIGHTED_MAX = 1 << 16  # elements; of larger tensors only the sums of rows and of columns are weighted, which takes little memory


@functools.lru_cache(64)
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int32, device=device)


def _integer(dtype: torch.dtype) -> torch.dtype:
    return {4: torch.int32, 2: torch.int16, 1: torch.uint8}[dtype.itemsize]


# DLPack's structs, version 0 (dmlc/dlpack, include/dlpack/dlpack.h).
class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", _Device), ("dimensions", ctypes.c_int32), ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.uint8: (1, 8)}
_CPU, _CUDA = 1, 2
_held: dict[int, tuple] = {}  # by the address of a managed tensor: what it needs until torch lets go of it


@_Deleter
def _let_go(managed) -> None:
    _held.pop(ctypes.addressof(managed.contents), None)


def _from_dlpack(memory: Memory, address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    kind = _CUDA if device.type == "cuda" else _CPU
    sizes = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    code, bits = _CODES[dtype]
    managed = _ManagedTensor(
        _Tensor(address, _Device(kind, device.index or 0), len(shape), _DataType(code, bits, 1), sizes, None, 0), None, _let_go
    )
    _held[ctypes.addressof(managed)] = (managed, sizes, memory)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.utils.dlpack.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))
