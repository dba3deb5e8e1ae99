"""A forward that counts its calls outside of its modules' attributes: the forward that shows the order of units is not counted, so that a
warm-up within the model, a meter or a memory bank is torch's."""

import array
import contextvars
import functools
import os
import threading
import types
from collections import deque

import numpy
import pytest
import torch
from ranks import on_places
from torch import nn
from training import squared_error, with_engine, with_torch

import ebb

COUNTED = {"n": 0}
CALLS = []
calls = 0


class Meter:
    def __init__(self):
        self.sum, self.values = 0.0, []

    def update(self, value):
        self.sum += value
        self.values.append(value)
        return len(self.values)


def counter():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


class Counts(nn.Module):
    """`count` is called in each forward, and gives the number of calls so far. It changes the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        n = self.count()
        SEEN.append(n)
        for block in self.blocks:
            x = block(x)
        return x * min(1.0, n / 4)


SEEN = types.SimpleNamespace(values=[])
SEEN.append = SEEN.values.append


class InANamespace(Counts):
    def __init__(self):
        super().__init__()
        self.cfg = types.SimpleNamespace(n=0)

    def count(self):
        self.cfg.n += 1
        return self.cfg.n


class InANewAttribute(InANamespace):
    def __init__(self):
        super().__init__()
        self.cfg = Meter()

    def count(self):
        self.cfg.n = getattr(self.cfg, "n", 0) + 1
        return self.cfg.n


class InAMeter(Counts):
    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def count(self):
        return self.meter.update(1.0)


class InADict(Counts):
    def count(self):
        COUNTED["n"] += 1
        return COUNTED["n"]


class InAList(Counts):
    def count(self):
        CALLS.append(None)
        return len(CALLS)


class InAVariable(Counts):
    def count(self):
        global calls
        calls += 1
        return calls


class InAClass(Counts):
    number = 0

    def count(self):
        InAClass.number += 1
        return InAClass.number


class InAClosure(Counts):
    def __init__(self):
        super().__init__()
        self.counter = counter()

    def count(self):
        return self.counter()


class InAMemoryBank(Counts):
    """Keeps outputs of the forwards before."""

    def __init__(self):
        super().__init__()
        self.bank = deque(maxlen=5)

    def count(self):
        return len(self.bank) + 1

    def forward(self, x):
        y = super().forward(x)
        y = y + sum(kept.mean() for kept in self.bank)
        self.bank.append(y.detach())
        return y


class InATensor(Counts):
    """Of an attribute that is no buffer."""

    def __init__(self):
        super().__init__()
        self.number = torch.zeros(1)

    def count(self):
        self.number += 1
        return int(self.number)


class Outside(Counts):
    """In places outside of the model, each counted by itself."""

    def __init__(self):
        super().__init__()
        TENSOR.zero_(), NUMBERS.fill(0), LOCAL.__dict__.update(n=0), vars(_noted).clear(), os.environ.pop("FORWARDS", None)
        ARRAY[0] = BYTES[0] = SLOTTED.n = cached().n = 0
        OF_CONTEXT.set(0)

    def count(self):
        TENSOR.add_(1)
        NUMBERS[1] += 1
        ARRAY[0] += 1
        BYTES[0] += 1
        for one in (LOCAL, SLOTTED, cached()):
            one.n += 1
        _noted.calls = getattr(_noted, "calls", 0) + 1
        OF_CONTEXT.set(OF_CONTEXT.get() + 1)
        os.environ["FORWARDS"] = str(int(os.environ.get("FORWARDS", 0)) + 1)
        counts = {
            int(TENSOR), int(NUMBERS[1]), ARRAY[0], BYTES[0], LOCAL.n, SLOTTED.n, cached().n, _noted.calls, OF_CONTEXT.get(), int(os.environ["FORWARDS"])
        }
        return counts.pop() if len(counts) == 1 else counts


class Slotted:
    __slots__ = ("n",)


@functools.lru_cache
def cached():
    return types.SimpleNamespace(n=0)


SLOTTED = Slotted()
TENSOR, NUMBERS, ARRAY, BYTES = torch.zeros(()), numpy.zeros(2), array.array("q", [0]), bytearray(1)
LOCAL = threading.local()
OF_CONTEXT = contextvars.ContextVar("forwards")


def _noted():
    """A function that has a count as its attribute."""


KINDS = [InANamespace, InANewAttribute, InAMeter, InADict, InAList, InAVariable, InAClass, InAClosure, InAMemoryBank, InATensor, Outside]


def made(kind):
    global calls
    calls, COUNTED["n"], InAClass.number = 0, 0, 0
    CALLS.clear(), SEEN.values.clear()
    return kind()


@on_places
def test_the_forward_that_shows_the_order_is_not_counted(place):
    batches = place.batches(3)
    for kind in KINDS:
        for example in (None, batches[0][0][0][:1]):
            losses, _ = with_engine(made(kind), batches, squared_error, place.config(), example=example)
            assert SEEN.values == [1, 2, 3], (kind, example)
            if place.ranks == 1:
                assert losses == pytest.approx(with_torch(made(kind), batches, squared_error), abs=2e-6), kind


@on_places
def test_a_forward_hook_reads_the_parameters_of_its_module(place):
    """Hooks of the user's that come after initialize, and read or use their module's parameters."""
    def by_hooks(model, norms):
        for block in model.blocks:
            block.register_forward_hook(lambda module, arguments, output: norms.append(module.weight.norm().item()))
            block.register_forward_hook(lambda module, arguments, output: output + 0.1 * module.bias.mean())

    batches = place.batches(2)
    plain, expected = made(InANamespace), []
    by_hooks(plain, expected)
    losses = with_torch(plain, batches, squared_error)
    model, norms = made(InANamespace), []
    engine = ebb.initialize(model, place.config())
    by_hooks(model, norms)
    for step, of_step in enumerate(batches):
        engine.backward(squared_error(model, of_step[engine.world.rank]))
        engine.step()
        if place.ranks == 1:
            assert engine.report().loss == pytest.approx(losses[step], abs=2e-6)
    if place.ranks == 1:
        assert norms == pytest.approx(expected, abs=1e-5)
    else:
        assert len(norms) == 6 and all(norm > 0 for norm in norms)
    engine.close()


WAITING = []  # batches of a loader, which no code of the model names


class Waits(InANamespace):
    def __init__(self):
        super().__init__()
        self.begins, self.filled = threading.Event(), threading.Event()

    def forward(self, x):
        self.begins.set(), self.filled.wait()
        return super().forward(x)


@on_places
def test_what_another_thread_loads_meanwhile_stays(place):
    model = made(Waits)

    def fill():
        model.begins.wait()
        WAITING.append("a batch")
        model.filled.set()

    WAITING.clear()
    loader = threading.Thread(target=fill)
    loader.start()
    engine = ebb.initialize(model, place.config(), example=place.batches()[0][0][0][:1])
    loader.join()
    assert WAITING == ["a batch"]
    engine.close()
