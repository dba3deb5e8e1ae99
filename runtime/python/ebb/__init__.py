"""Ebb trains a torch.nn.Module with its parameters, gradients and optimizer states in shards over ranks, on the device, in RAM or on NVMe.

    engine = ebb.initialize(model, "ds_config.json")
    loss = criterion(model(x), y)
    engine.backward(loss)
    engine.step()

docs/python.md explains all calls. A module imports only modules of its own layer, none in a circle, and of those below it:

  calls     initialize, plan and predict_memory (_making), tensor ranks of a model and a configuration (_tensor_ranks), count_activations (_activations), ebb.checkpoint, ebb.integrations, ebb.schedules
  engine    Engine and Ticket; state dicts and files (saving, _buffers, _entries); values (_state), steps (_steps, _open_steps), ranks (_world), rates (optimizer); checkpoints without an engine (_saved_run)
  walk      from autograd to scopes (_walk, _saved_tensors); the order of units, by a forward without traces (_order, _fakes, _counted, _generators)
  model     units and their uses (_units, _visits); what is refused (_fixed); where values come from (_model, _files, _given_values, _conversions)
  tensors   over the engine's memory (_tensors); parameters without a value (_hidden, checks), and DTensors, of which a rank has a block (_blocks); exceptions on tensor ranks (_tensor_faults)
  library   the functions of libebb.so.1 (_library), rows of numbers (_reports), one copy of a model a host (_host_file)"""

from __future__ import annotations

import contextlib
import logging
from typing import Callable, Iterator

try:
    import torch
except ModuleNotFoundError as missing:
    raise ImportError("ebb needs torch, which it does not install, as its build is yours to choose: pip install torch") from missing

from . import _library
from ._activations import Activations, count_activations
from ._library import Error
from ._making import initialize, plan, predict_memory
from ._reports import CommunicationRow, MemoryRow, Report, TrafficRow
from ._world import World, world
from .engine import Engine
from .optimizer import Optimizer
from .saving import Ticket, write_shapes

__version__ = _library.library.ebb_version().decode()
__all__ = [
    "Activations", "CommunicationRow", "Engine", "Error", "MemoryRow", "Optimizer", "Report", "Ticket", "TrafficRow", "World", "count_activations",
    "empty_parameters", "initialize", "log_to", "plan", "predict_memory", "world", "write_shapes",
]

_log = None
_of_python: logging.Handler | None = None


class _Sink(logging.Handler):
    """Hands the lines of Python's logger "ebb" to a sink."""

    def __init__(self, sink: Callable[[str, str], None]):
        super().__init__()
        self.sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        self.sink("warning" if record.levelno >= logging.WARNING else "info", record.getMessage())


def log_to(sink: Callable[[str, str], None] | None) -> None:
    """Sends the log lines of the library and of this package to `sink`("info" or "warning", line) instead of standard error; None: to standard
    error again. The package's lines still go to Python's logger "ebb" too, whose level holds for them. Threads of the engine call the sink.
    The sink must not call the engine."""
    global _log, _of_python
    logger = logging.getLogger("ebb")
    if _of_python is not None:
        logger.removeHandler(_of_python)
    send = lambda user, level, message: sink("warning" if level else "info", message.decode(errors="replace"))
    made = _library.LOG(send) if sink else _library.LOG()
    _library.library.ebb_log_to(made, None)
    _log, _of_python = made, _Sink(sink) if sink else None
    if _of_python is not None:
        logger.addHandler(_of_python)


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules that are made in this context have parameters on the meta device, which take no memory, and real buffers. Give such a
    model to initialize(weights=)."""
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            empty = torch.nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            module._parameters[name] = empty

    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
