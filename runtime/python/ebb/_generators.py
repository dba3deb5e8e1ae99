"""Generators of random numbers, whose states a forward that only shows what the model does must leave as they are."""

from __future__ import annotations

import contextlib
import random
import sys
from typing import Any, Callable, Iterator

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ._fakes import namespaces_of, within


class _Used(TorchFunctionMode):
    """Notes the state of each torch.Generator before the first operator that takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        for value in (*arguments, *keywords.values()):
            if isinstance(value, torch.Generator) and id(value) not in self.states:
                self.states[id(value)] = value, value.get_state()
        return function(*arguments, **keywords)


@contextlib.contextmanager
def generators_as_they_were(model: nn.Module, example: Any, device: torch.device) -> Iterator[None]:
    """Those of torch: the default ones, and those that operators take. Those of Python and numpy, which models use to leave layers out: the
    global ones, and those that the model, its Python modules and `example` hold."""
    is_on_gpu = device.type == "cuda" and torch.cuda.is_available()
    back = [_back(random)]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        back.append(_back(numpy))
    kinds = (random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))
    held = [*(vars(place) for place in namespaces_of(model)), *(vars(module) for module in model.modules()), example]
    back += [_back(value) for value in within(held) if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)]
    used = _Used()
    try:
        with torch.random.fork_rng(devices=[device] if is_on_gpu else []), used:
            yield
    finally:
        for generator, state in used.states.values():
            generator.set_state(state)
        for restore in back:
            restore()


def _back(generator: Any) -> Callable[[], None]:
    """Gives the generator, or the module of global ones, its state of now back."""
    for get, give in (("getstate", "setstate"), ("get_state", "set_state")):
        if hasattr(generator, get):
            state = getattr(generator, get)()
            return lambda: getattr(generator, give)(state)
    bits, state = generator.bit_generator, generator.bit_generator.state
    return lambda: setattr(bits, "state", state)
