"""What a model's forward keeps for its backward, counted with tensors that have shapes and no values."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable

import torch
from torch import nn

from ._model import Config, config_text, dtype_function, resolved
from ._order import _as_it_was, _faked, call
from ._units import UnitsArgument, divide


def activations(
    model: nn.Module, config: Config, example: Any, *, units: UnitsArgument = None, resident: Iterable[str] = ()
) -> dict[str, int]:
    """Bytes that a forward of `example` (as of initialize) keeps for its backward, by the unit in whose forward autograd saves them; ""
    has what is saved outside of units. The sum is for `ebb-plan --activations`. From a live model or one on the meta device, with its
    parameters in the types that `config` computes them in. Needs no memory and computes nothing.

    Memory that several tensors share counts once, where it is saved first; parameters and buffers do not count. A block that is
    checkpointed keeps its inputs. What it keeps when its backward computes it again, and what any backward has in hand, is not in
    it. The memory of an engine's own tensors is predict_memory's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    divided = divide(model, units, resident)
    name_of = {module: unit.name for unit in divided for module in unit.modules}
    kept = {"": 0} | {unit.name: 0 for unit in divided}
    open_units = [""]
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no other one gets its number

    def is_new(tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storages.setdefault(storage._cdata, storage) is storage

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if is_new(tensor):
            kept[open_units[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    def enter(module: nn.Module, inputs: Any) -> None:
        open_units.append(name_of[module])

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_units.pop()

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    dtype_of = dtype_function(model, resolved(config_text(config), 1))
    with torch.random.fork_rng(devices=[]), mode, _as_it_was(model), _faked(model, torch.device("cpu"), dtype_of) as fakes:
        for fake in fakes.values():
            is_new(fake)
        with contextlib.ExitStack() as hooks:
            for module in name_of:
                hooks.callback(module.register_forward_pre_hook(enter).remove)
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            hooks.enter_context(torch.enable_grad())
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor))
            call(model, example, mode.from_tensor)
    return {name: held for name, held in kept.items() if held > 0 or name}
