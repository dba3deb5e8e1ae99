"""Torch tensors over the engine's memory, and what a parameter shows while that memory is another's.

Only the CPU has been run. What CUDA needs beside it is here and nowhere else: tensors by DLPack, whose vocabulary has bf16,
and the number of the current stream."""

from __future__ import annotations

import ctypes
import os
from typing import Sequence

import torch

from ._library import Error, library

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
NUMBER_OF_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Memory:
    """The engine's handle. Tensors over its memory hold it, so memory goes with the last of them."""

    def __init__(self, handle: int):
        self.handle = handle
        self.process = os.getpid()
        self.closed = False

    def check_process(self) -> None:
        if os.getpid() != self.process:
            raise Error("this process was forked from the engine's, and has none of its threads: call the engine in the parent")

    def close(self) -> int:
        self.closed = True
        return library.ebb_engine_close(self.handle) if os.getpid() == self.process else 0

    def __del__(self) -> None:
        # A forked child has the memory, and none of the engine's threads.
        if os.getpid() == self.process:
            library.ebb_engine_destroy(self.handle)


def over(memory: Memory, address: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor over `address`. It holds `memory`."""
    elements = 1
    for size in shape:
        elements *= size
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
    """The parameters of one unit: shown while one of its scopes is open, else a NaN of the true shape, to which nothing
    can be written. Those that the engine keeps whole are always shown."""

    def __init__(self, parameters: list[torch.nn.Parameter], keep_whole: bool):
        self.parameters = parameters
        self.keep_whole = keep_whole
        self.views: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []

    def place(self, views: list[torch.Tensor]) -> None:
        self.views = views
        self.hidden = [torch.full((), float("nan"), dtype=view.dtype, device=view.device).expand(view.shape) for view in views]
        self.show() if self.keep_whole else self.hide()

    def show(self) -> None:
        for parameter, view in zip(self.parameters, self.views):
            parameter.data = view

    def hide(self) -> None:
        if not self.keep_whole:
            self.conceal()

    def conceal(self) -> None:
        for parameter, hidden in zip(self.parameters, self.hidden):
            parameter.data = hidden


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
_CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16), torch.int8: (0, 8)}
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
