"""The C functions of libebb.so.1 (runtime/c/ebb.h) for Python: structs, signatures, and errors as exceptions."""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Callable

ABI = 1

Rates = list[tuple[str, "float | None", "float | None"]]  # group, learning rate, weight decay; None: the configuration's
CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
    "UNAUTHENTICATED",
)
STATES = ("parameter", "master", "gradient", "optimizer", "activation", "gather", "secondary", "staging", "workspace", "driver", "control")
TIERS = ("device", "cpu", "nvme")
DIRECTIONS = ("read", "write")
FORWARD, BACKWARD, RECOMPUTE = 0, 1, 2
SHOW = 3  # for a backward that gives no parameter a gradient: of the walk, to the library a forward of an evaluation
PARAMETER, MASTER, GRADIENT, OPTIMIZER = 0, 1, 2, 3


class Error(RuntimeError):
    """The engine has refused a call, or has failed. `code` is a name such as "INVALID_ARGUMENT". The text names the module, the
    parameter, the rank or the file that is wrong."""

    def __init__(self, text: str, code: str = "FAILED_PRECONDITION"):
        super().__init__(text)
        self.code = code
        self.outside: list[str] = []  # parameters that are used outside of their module


FILL = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32, c_int64, c_int64, POINTER(c_float))
SINK = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int32, c_int64, c_int64, POINTER(c_float))
LOG = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_char_p)


class Struct(ctypes.Structure):
    """A struct of ebb.h that begins with struct_size. Sets that field."""

    def __init__(self, **values: Any):
        super().__init__(**values)
        self.struct_size = ctypes.sizeof(self)


class WorldOptions(Struct):
    _fields_ = [("struct_size", c_uint32), ("timeout_seconds", c_double)]


class WorldFacts(Struct):
    _fields_ = [("struct_size", c_uint32), ("rank", c_int32), ("size", c_int32), ("local_rank", c_int32), ("local_size", c_int32)]


class Parameter(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("trainable", c_int32), ("name", c_char_p), ("group", c_char_p), ("shape", POINTER(c_int64)),
        ("dimensions", c_int32), ("source_dtype", c_int32), ("source", c_void_p), ("file", c_char_p), ("tensor", c_char_p),
        ("fill", FILL), ("user", c_void_p), ("has_dtype", c_int32), ("dtype", c_int32), ("matrix_update", c_int32),
        ("has_split", c_int32), ("split_dimension", c_int32), ("split_parts", POINTER(c_int64)), ("split_sizes", POINTER(c_int64)),
        ("split_part_count", c_int32), ("split_size_count", c_int32), ("split_multiple", c_int64), ("sums_gradient", c_int32),
        ("block_rank", c_int32), ("block_ranks", c_int32),
    ]


class Visit(Struct):
    _fields_ = [("struct_size", c_uint32), ("unit", c_int32), ("forward", c_int32), ("backward", c_int32), ("gradients", c_int32)]


class Event(ctypes.Structure):
    _fields_ = [("opens", c_int32), ("kind", c_int32), ("visit", c_int32)]


class MemoryRow(ctypes.Structure):
    _fields_ = [("state", c_int32), ("tier", c_int32), ("predicted", c_uint64), ("current", c_uint64), ("peak", c_uint64)]


class UpdateSlice(ctypes.Structure):
    _fields_ = [
        ("parameter", c_int32), ("states", c_int32), ("begin", c_int64), ("end", c_int64), ("step", c_int64), ("learning_rate", c_double),
        ("master", c_void_p), ("gradient", c_void_p), ("state", POINTER(c_void_p)), ("stream", c_void_p),
    ]


UPDATE = ctypes.CFUNCTYPE(c_int32, c_void_p, POINTER(UpdateSlice))


class EngineOptions(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("threads", c_int32), ("device", c_char_p), ("name", c_char_p), ("compute_stream", c_void_p),
        ("initial_values_of_rank_0", c_int32), ("error", c_char_p), ("update", UPDATE), ("update_user", c_void_p),
        ("update_states", POINTER(c_char_p)), ("update_state_count", c_int32),
    ]


class View(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("elements", c_int64), ("dtype", c_int32), ("gradient_dtype", c_int32)]


class MeshFacts(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("data_rank", c_int32), ("data_ranks", c_int32), ("tensor_rank", c_int32), ("tensor_ranks", c_int32),
    ]


class GroupOptions(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("has_learning_rate", c_int32), ("has_weight_decay", c_int32), ("group", c_char_p),
        ("learning_rate", c_double), ("weight_decay", c_double),
    ]


def group_options(rates: Rates) -> ctypes.Array[GroupOptions]:
    return (GroupOptions * len(rates))(
        *[
            GroupOptions(
                group=name.encode(), has_learning_rate=rate is not None, learning_rate=rate or 0.0,
                has_weight_decay=decay is not None, weight_decay=decay or 0.0,
            )
            for name, rate, decay in rates
        ]
    )


class StepOptions(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("micro_batches", c_int32), ("hold_updates", c_int32), ("may_leave_out", c_int32),
        ("rates_at_finish", c_int32), ("group_count", c_int32), ("groups", POINTER(GroupOptions)), ("has_learning_rate", c_int32),
        ("learning_rate", c_double), ("gradient_divisor", c_double),
    ]


class FinishOptions(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("group_count", c_int32), ("groups", POINTER(GroupOptions)), ("gradient_scale", c_double),
        ("error", c_char_p),
    ]


class Gradient(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("elements", c_int64), ("dtype", c_int32), ("first", c_int32)]


class StepReport(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("applied", c_int32), ("step", c_int64), ("skipped_steps", c_int64), ("loss", c_double),
        ("gradient_norm", c_double), ("loss_scale", c_double), ("learning_rate", c_double),
    ]


class SaveOptions(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("keep", c_int32), ("trainer", c_char_p), ("trainer_bytes", c_int64), ("of_this_rank", c_char_p),
        ("of_this_rank_bytes", c_int64), ("buffers", c_char_p), ("buffers_bytes", c_int64),
    ]


class Loaded(Struct):
    _fields_ = [
        ("struct_size", c_uint32), ("ranks", c_int32), ("step", c_int64), ("trainer", c_void_p), ("trainer_bytes", c_int64),
        ("of_this_rank", c_void_p), ("of_this_rank_bytes", c_int64), ("buffers", c_void_p), ("buffers_bytes", c_int64),
    ]


class LoadOptions(Struct):
    _fields_ = [("struct_size", c_uint32), ("without_states", c_int32), ("partial", c_int32)]


class TrafficRow(ctypes.Structure):
    _fields_ = [("state", c_int32), ("tier", c_int32), ("direction", c_int32), ("predicted", c_uint64), ("bytes", c_uint64)]


class CommunicationRow(ctypes.Structure):
    _fields_ = [("operation", c_char * 24), ("predicted", c_uint64), ("bytes", c_uint64)]


# By the names in ebb.h; tests/python/abi_test.py compares them with the compiler's.
STRUCTS = {
    "ebb_world_options": WorldOptions, "ebb_world_facts": WorldFacts, "ebb_parameter": Parameter, "ebb_visit": Visit,
    "ebb_event": Event, "ebb_memory_row": MemoryRow, "ebb_update_slice": UpdateSlice, "ebb_engine_options": EngineOptions, "ebb_view": View, "ebb_mesh_facts": MeshFacts,
    "ebb_group_options": GroupOptions, "ebb_step_options": StepOptions, "ebb_finish_options": FinishOptions,
    "ebb_gradient": Gradient, "ebb_report": StepReport, "ebb_save_options": SaveOptions, "ebb_loaded": Loaded, "ebb_load_options": LoadOptions,
    "ebb_traffic_row": TrafficRow, "ebb_communication_row": CommunicationRow,
}

_handle, _out = c_void_p, POINTER(c_void_p)
_count, _text = POINTER(c_int32), (c_char_p, c_size_t, POINTER(c_size_t))
SIGNATURES = {
    "ebb_abi": (c_uint32,),
    "ebb_version": (c_char_p,),
    "ebb_error": (c_char_p,),
    "ebb_log_to": (None, LOG, c_void_p),
    "ebb_config_resolve": (c_int32, c_char_p, c_int32, *_text),
    "ebb_world_open": (c_int32, POINTER(WorldOptions), _out),
    "ebb_world_close": (None, _handle),
    "ebb_world_describe": (c_int32, _handle, POINTER(WorldFacts)),
    "ebb_world_fail": (c_int32, _handle, c_char_p),
    "ebb_model_create": (_handle,),
    "ebb_model_destroy": (None, _handle),
    "ebb_model_add_unit": (c_int32, _handle, c_char_p, c_int32),
    "ebb_model_add_parameter": (c_int32, _handle, c_int32, POINTER(Parameter)),
    "ebb_model_add_visit": (c_int32, _handle, POINTER(Visit)),
    "ebb_model_set_order": (c_int32, _handle, POINTER(Event), c_int32),
    "ebb_plan": (c_int32, _handle, c_int32, c_char_p, *_text),
    "ebb_predict_memory": (c_int32, _handle, c_int32, c_char_p, POINTER(MemoryRow), c_int32, _count),
    "ebb_engine_create": (c_int32, _handle, _handle, c_char_p, POINTER(EngineOptions), _out),
    "ebb_engine_close": (c_int32, _handle),
    "ebb_engine_destroy": (None, _handle),
    "ebb_engine_views": (c_int32, _handle, c_int32, POINTER(View), c_int32, _count),
    "ebb_engine_await_whole": (c_int32, _handle, c_int32, POINTER(c_int32)),
    "ebb_engine_agree": (c_int32, _handle, c_char_p),
    "ebb_engine_reorder": (c_int32, _handle, POINTER(Visit), c_int32, POINTER(Event), c_int32),
    "ebb_engine_suspend": (c_int32, _handle, c_int32),
    "ebb_engine_copy_parameters": (c_int32, _handle, _handle),
    "ebb_engine_mesh": (c_int32, _handle, POINTER(MeshFacts)),
    "ebb_tensor_all_reduce": (c_int32, _handle, c_void_p, c_int64, c_int32, c_int32),
    "ebb_tensor_all_gather": (c_int32, _handle, c_void_p, c_void_p, c_int64, c_int32),
    "ebb_tensor_reduce_scatter": (c_int32, _handle, c_void_p, c_void_p, c_int64, c_int32),
    "ebb_step_begin": (c_int32, _handle, POINTER(StepOptions)),
    "ebb_scope_open": (c_int32, _handle, c_int32, c_int32, POINTER(c_int64)),
    "ebb_scope_close": (c_int32, _handle, c_int64),
    "ebb_scope_gradients": (c_int32, _handle, c_int64, POINTER(c_int32), c_int32, POINTER(Gradient)),
    "ebb_add_loss": (c_int32, _handle, c_void_p),
    "ebb_step_loss_scale": (c_int32, _handle, POINTER(c_float), _out),
    "ebb_step_reduce": (c_int32, _handle),
    "ebb_step_finish": (c_int32, _handle, POINTER(FinishOptions)),
    "ebb_step_drop": (c_int32, _handle),
    "ebb_step_report": (c_int32, _handle, POINTER(StepReport)),
    "ebb_scheduled_rate": (c_int32, _handle, c_char_p, POINTER(c_double)),
    "ebb_evaluation_begin": (c_int32, _handle),
    "ebb_evaluation_finish": (c_int32, _handle, POINTER(c_double)),
    "ebb_read": (c_int32, _handle, c_int32, c_char_p, SINK, c_void_p),
    "ebb_write": (c_int32, _handle, c_int32, c_char_p, FILL, c_void_p),
    "ebb_read_parameter": (c_int32, _handle, c_int32, c_int32, c_char_p, SINK, c_void_p),
    "ebb_write_parameter": (c_int32, _handle, c_int32, c_int32, c_char_p, FILL, c_void_p),
    "ebb_gather": (c_int32, _handle, c_int32, c_int32, c_int32, SINK, c_void_p),
    "ebb_gather_state": (c_int32, _handle, c_int32, c_int32, c_char_p, c_int32, SINK, c_void_p),
    "ebb_save": (c_int32, _handle, c_char_p, POINTER(SaveOptions), POINTER(c_int64)),
    "ebb_save_wait": (c_int32, _handle, c_int64, POINTER(c_int32)),
    "ebb_load": (c_int32, _handle, c_char_p, POINTER(Loaded)),
    "ebb_load_with": (c_int32, _handle, c_char_p, POINTER(LoadOptions), POINTER(Loaded)),
    "ebb_import_tensors": (c_int32, c_char_p, c_char_p),
    "ebb_memory": (c_int32, _handle, POINTER(MemoryRow), c_int32, _count),
    "ebb_traffic": (c_int32, _handle, POINTER(TrafficRow), c_int32, _count),
    "ebb_communication": (c_int32, _handle, POINTER(CommunicationRow), c_int32, _count),
}


def _load() -> ctypes.CDLL:
    path = os.environ.get("EBB_LIBRARY") or str(Path(__file__).with_name("libebb.so.1"))
    if not os.path.exists(path):
        raise ImportError(f"ebb: there is no {path}. Install the wheel (pip install .), or name the library in EBB_LIBRARY.")
    loaded = ctypes.CDLL(path)
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    if loaded.ebb_abi() != ABI:
        raise ImportError(f"ebb: {path} has ABI {loaded.ebb_abi()}, but this package needs ABI {ABI}: install both from one source")
    return loaded


library = _load()


_ORDER_IN_CPP = re.compile(r"ModelSpec::(forward|order)(, ModelSpec::(forward|order))*")


def error_text() -> str:
    """The text of the last error of this thread, with Python's names."""
    return _ORDER_IN_CPP.sub("example= of ebb.initialize", library.ebb_error().decode(errors="replace"))


def fail(code: int) -> None:
    name = CODES[code] if 0 <= code < len(CODES) else str(code)
    raise Error(error_text(), name)


def check(code: int) -> None:
    if code != 0:
        fail(code)


def check_id(number: int) -> int:
    if number < 0:
        fail(3)
    return number


def text_of(call: Callable[..., int], *arguments: Any) -> str:
    needed = c_size_t()
    check(call(*arguments, None, 0, ctypes.byref(needed)))
    buffer = ctypes.create_string_buffer(needed.value)
    check(call(*arguments, buffer, needed.value, None))
    return buffer.value.decode()


def rows_of(kind: type, call: Callable[..., int], *arguments: Any) -> list:
    count = c_int32()
    check(call(*arguments, None, 0, ctypes.byref(count)))
    rows = (kind * max(count.value, 1))()
    check(call(*arguments, rows, count.value, ctypes.byref(count)))
    return list(rows[: count.value])
