"""A batch uses a unit less often than example= did: a loop ends earlier, a sequence is shorter, a head is left out."""

import pytest
import torch
from ranks import on_one, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import SGD, compare, config, offloaded

import ebb

MOST = 3  # passes, as the example has them
UNITS = ("Sequential", "Linear", "GRUCell", "LSTMCell")


def block(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


class Loop(nn.Module):
    """One block, several times, before a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.blocks, self.head = block(), nn.ModuleList([block()]), nn.Linear(8, 1)

    def again(self, x):
        for one in self.blocks:
            x = one(x)
        return x

    def forward(self, x, passes):
        x = self.first(x)
        for _ in range(passes):
            x = self.again(x)
        return self.head(x)


class LoopOfTwo(Loop):
    def __init__(self):
        super().__init__()
        self.blocks.append(block())


class LoopAtTheEnd(Loop):
    def forward(self, x, passes):
        x = self.first(self.head(x).tanh().expand(-1, 8))
        for _ in range(passes):
            x = self.again(x)
        return x.mean(dim=1, keepdim=True)


class LoopUnderCheckpoint(Loop):
    reentrant = False

    def again(self, x):
        return checkpoint(super().again, x, use_reentrant=self.reentrant)


class LoopUnderReentrantCheckpoint(LoopUnderCheckpoint):
    reentrant = True


class TiedEnds(Loop):
    """The first unit comes behind the loop, too."""

    def forward(self, x, passes):
        x = self.first(x)
        for _ in range(passes):
            x = self.again(x)
        return self.head(self.first(x))


class Supervised(Loop):
    """The head is called after each pass."""

    def forward(self, x, passes):
        x, outputs = self.first(x), []
        for _ in range(passes):
            x = self.again(x)
            outputs.append(self.head(x))
        return sum(outputs)


class Cells(nn.Module):
    """A recurrent cell over a sequence of any length."""

    def __init__(self, kind=nn.GRUCell):
        super().__init__()
        torch.manual_seed(4)
        self.cell, self.head = kind(8, 8), nn.Linear(8, 1)

    def forward(self, x, passes):
        state = None
        for at in range(passes):
            state = self.cell(x * (at + 1), state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class LstmCells(Cells):
    def __init__(self):
        super().__init__(nn.LSTMCell)


KINDS = [Loop, LoopOfTwo, LoopAtTheEnd, LoopUnderCheckpoint, LoopUnderReentrantCheckpoint, TiedEnds, Supervised, Cells, LstmCells]


def _batches(passes, of_step):
    generator = torch.Generator().manual_seed(5)
    return [[(torch.randn(2, 8, generator=generator), torch.randn(2, 1, generator=generator), count)] * of_step for count in passes]


def _zero(folder):
    return offloaded(folder) if ebb.world().size > 1 else {}


def _loss(model, batch):
    x, y, passes = batch
    return (model(x, passes) - y).square().mean()


@pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@on_ranks
def test_a_loop_ends_earlier_than_in_the_example(kind, folder):
    batches = _batches((2, 3, 1, 2, 1, 3), ebb.world().size)
    compare(kind, batches, _loss, settings=config(zero=_zero(folder)), example=(torch.zeros(2, 8), MOST), units=UNITS)


@pytest.mark.parametrize("kind", [Loop, LoopOfTwo, LoopUnderCheckpoint], ids=lambda kind: kind.__name__)
@on_one
def test_a_batch_makes_no_pass_at_all(kind):
    # Torch's AdamW leaves out a parameter without a gradient, and Ebb counts a gradient of 0.
    compare(kind, _batches((0, 3, 0, 1), 1), _loss, optimizer=SGD, settings=config(optimizer=SGD), example=(torch.zeros(2, 8), MOST), units=UNITS)


@on_one
def test_each_micro_batch_ends_after_another_pass():
    """Each micro-batch of a step has passes of its own."""
    batches = [[one, other] for (one, _), (other, _) in zip(_batches([2, 3, 1, 3], 2), _batches([1, 2, 3, 3], 2))]
    compare(Loop, batches, _loss, settings=config(gradient_accumulation_steps=2), accumulate=2, example=(torch.zeros(2, 8), MOST),
            units=UNITS)


class HeadAtPlaces(Loop):
    """The head is called before, between and behind two blocks, and a batch has some of these calls."""

    def __init__(self):
        super().__init__()
        self.last = block()

    def headed(self, x):
        return self.head(x)

    def forward(self, x, places):
        x, outputs = self.first(x), []
        for place, one in enumerate((self.blocks[0], self.last, nn.Identity())):
            if place in places:
                outputs.append(self.headed(x))
            x = one(x)
        return sum(outputs) + x.mean(dim=1, keepdim=True)


class HeadUnderCheckpoint(HeadAtPlaces):
    def headed(self, x):
        return checkpoint(self.head, x, use_reentrant=False)


def _head_at(kind, places, zero, **options):
    settings = config(zero=zero, optimizer=SGD)
    compare(kind, _batches(places, ebb.world().size), _loss, settings=settings, optimizer=SGD, units=UNITS, **options)


PLACES = [(1, 2), (0, 1), (2,), (0, 2), (0, 1, 2), (0,), (1,), ()]


@pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)
@on_ranks
def test_a_head_without_its_first_call(folder):
    zero, example = _zero(folder), (torch.zeros(2, 8), (0, 1, 2))
    for kind in (HeadAtPlaces, HeadUnderCheckpoint):
        _head_at(kind, PLACES, zero, example=example)
    _head_at(HeadAtPlaces, PLACES, zero, example=example, resident=["head.*"])
    model = HeadAtPlaces()
    engine = ebb.initialize(model, config(zero=zero), example=example, units=UNITS)
    for places in ((0, 1, 2), (1, 2)):
        engine.reorder((torch.zeros(2, 8), places))
        engine.backward(_loss(model, _batches([places], 1)[0][0])), engine.step()
        assert engine.report().gradient_norm > 0
    engine.close()


@on_one
def test_each_micro_batch_leaves_out_another_call():
    batches = [[_batches([places], 1)[0][0] for places in of_step] for of_step in zip(PLACES, PLACES[1:], PLACES[3:], PLACES[2:])]
    for kind in (HeadAtPlaces, HeadUnderCheckpoint):
        compare(kind, batches, _loss, settings=config(gradient_accumulation_steps=4), accumulate=4, units=UNITS, example=(torch.zeros(2, 8), (0, 1, 2)))
