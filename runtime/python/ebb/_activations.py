"""Counts the memory that a torch module's forward and backward take beside the engine's, without computing.

The model runs once with fake tensors, which have shapes and no values. A storage counts from the operation that makes it until it is
freed, so recomputing (torch.utils.checkpoint), views and in-place operations count as they are."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ._blocks import local_of
from ._fakes import Fakes, faked
from ._generators import generators_as_they_were
from ._library import Error
from ._model import Config, config_text, dtype_function, resolved
from ._order import _as_it_was, call, loss_of, uncompiled
from ._steps import LARGE_GRADIENT
from ._tensor_ranks import cut_alone, silent_group


@dataclass(frozen=True)
class Activations:
    """Bytes of torch's tensors on a rank, without parameters, buffers and the batch. They do not count what kernels allocate for
    themselves, nor how an allocator rounds."""

    saved: int  # at the end of forward
    peak: int  # the most at a time, in forward and backward


# With a workspace that they save for backward, whose size their fake kernels do not know: of nn.LSTM on a CPU, of all RNNs on a GPU.
_UNCOUNTED = ("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn")


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, weakref.ref] = {}  # by the id of a storage

    def ignore(self, tensor: torch.Tensor) -> None:
        self._add(local_of(tensor).untyped_storage(), 0)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        if any(hasattr(kind, "_local_tensor") for kind in types):
            return NotImplemented  # a DTensor then calls the operators of its local tensor, which this rank holds
        if function._schema.name in _UNCOUNTED:
            raise Error(
                f"the memory of an nn.LSTM, nn.GRU or nn.RNN that runs as {function._schema.name} cannot be counted, because this kernel saves a "
                "workspace of a size of its own: measure a run, or count the model without this module", "UNIMPLEMENTED"
            )
        output = function(*arguments, **(keywords or {}))
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._add(storage, storage.nbytes())
        return output

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)
        if key in self.known:
            return

        def forget(_: Any) -> None:
            del self.known[key]
            self.now -= size

        self.known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def _give(parameter: torch.Tensor) -> None:
    if parameter.grad.nbytes >= LARGE_GRADIENT:
        parameter.grad = None


def count_activations(model: nn.Module, config: Config, world: int, *, example: Any, device: str = "cpu") -> Activations:
    """Counts the activations of a micro-batch: `example` is one, or a function that takes the model and returns the loss, as for
    initialize. Parameters have the types that `config` gives them. Gradients of less than 1 MiB stay until the end of backward. Give
    `peak` to `ebb-plan --activations`. "ebb.offload_activations" and "cpu_checkpointing" are not counted: on a GPU they make the device's peak
    lower, and pinned RAM holds each saved tensor once for each operation that saves it. Raises ebb.Error if the model does not run with
    fake tensors, or has an RNN whose kernel saves a workspace (nn.LSTM on a CPU, any RNN on a GPU)."""
    with silent_group() as mesh_of_ranks:
        return _counted(cut_alone(model, config, world, mesh_of_ranks) or model, config, world, example, device)


def _counted(model: nn.Module, config: Config, world: int, example: Any, device: str) -> Activations:
    dtype_of = dtype_function(model, resolved(config_text(config), world))
    dtypes = {id(parameter): dtype_of(parameter) for parameter in model.parameters()}
    mode, count = Fakes(), _Count()
    stand_ins = faked(model, torch.device(device), mode, lambda tensor: dtypes.get(id(tensor), tensor.dtype))

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = mode.from_tensor(tensor)
        count.ignore(made)
        return made

    try:
        with generators_as_they_were(model, example, torch.device(device)), mode, _as_it_was(model), uncompiled(), stand_ins as fakes, torch.enable_grad():
            for tensor in fakes.values():
                count.ignore(tensor)
                if tensor.requires_grad:
                    tensor.register_post_accumulate_grad_hook(_give)
            with count:
                loss = loss_of(call(model, example, fake))
                saved = count.now
                if loss is not None:
                    loss.backward()
            return Activations(saved, count.peak)
    except Error:
        raise
    except Exception as error:  # what a model may raise for tensors without values
        raise Error(f"the model does not run with fake tensors: {type(error).__name__}: {error}", "INVALID_ARGUMENT") from error
    finally:
        mode.end()
