"""deepspeed.accelerator: torch.cuda where there is a GPU, else the CPU."""

import contextlib
import functools
import os
import random
from typing import Any

import torch


# What torch.cuda's functions of these names are without a GPU: a value that they return.
_ON_CPU: dict[str, Any] = {
    "set_device": None, "synchronize": None, "current_stream": None, "default_stream": None, "Stream": None, "stream": contextlib.nullcontext(),
    "device": contextlib.nullcontext(), "empty_cache": None, "reset_peak_memory_stats": None, "memory_allocated": 0, "max_memory_allocated": 0,
    "memory_reserved": 0, "max_memory_reserved": 0, "is_bf16_supported": True, "memory_stats": {}, "range_push": None,
    "range_pop": None,
}
_EVERYWHERE: dict[str, Any] = {
    "is_available": True, "is_fp16_supported": True, "supported_dtypes": [torch.float32, torch.float16, torch.bfloat16],
    "preferred_dtype": torch.bfloat16, "random": torch.random, "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
}
_OLD_NAMES = {
    "memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved", "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


class _Accelerator:
    def __init__(self) -> None:
        self._is_cuda = torch.cuda.is_available()
        self._name = "cuda" if self._is_cuda else "cpu"
        self._communication_backend_name = "nccl" if self._is_cuda else "gloo"

    def __getattr__(self, name: str) -> Any:
        name = _OLD_NAMES.get(name, name)
        if not name.startswith("_"):
            if name in _EVERYWHERE:
                return lambda: _EVERYWHERE[name]
            for where in (torch.cuda, torch.cuda.nvtx) if self._is_cuda else ():
                if hasattr(where, name):
                    return getattr(where, name)
            if not self._is_cuda and name in _ON_CPU:
                return lambda *arguments, **keywords: _ON_CPU[name]
            if not self._is_cuda and hasattr(torch, name):  # manual_seed, initial_seed, get_rng_state, ...
                return getattr(torch, name)
        raise AttributeError(f"Ebb's accelerator has no '{name}'")

    def is_synchronized_device(self) -> bool:
        return not self._is_cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or not self._is_cuda else f"cuda:{device_index}"

    def current_device(self) -> Any:
        return torch.cuda.current_device() if self._is_cuda else int(os.environ.get("LOCAL_RANK", 0))

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}" if self._is_cuda else "cpu"

    def device_count(self) -> int:
        return torch.cuda.device_count() if self._is_cuda else int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE", 1))

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version() if self._is_cuda else None

    def is_triton_supported(self) -> bool:
        return self._is_cuda

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._is_cuda else torch.default_generator

    def Event(self, **keywords: Any) -> Any:
        return torch.cuda.Event(**keywords) if self._is_cuda else torch.Event("cpu")

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_cuda:
            return torch.cuda.get_device_properties(device_index or 0).total_memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0] if self._is_cuda else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._is_cuda else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._is_cuda and tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name


@functools.cache
def get_accelerator() -> _Accelerator:
    return _Accelerator()


def set_random_seed(seed: int) -> None:
    """Of Python, numpy if it is imported, and torch."""
    import sys

    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
