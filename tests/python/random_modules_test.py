"""Modules drawn by chance against plain torch. EBB_SEEDS says how many, or from which to before which ("100:200"); a failure names its seed."""

import os
import random

import pytest
import torch
import training
from ranks import on_two
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import compare, config, squared_error, vector_batches

FIRST, _, END = os.environ.get("EBB_SEEDS", "0:30").rpartition(":")


class Block(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=draw.random() < 0.7)
        self.b = nn.Linear(8, 8) if draw.random() < 0.5 else None
        self.kind = draw.choice(["plain", "residual", "in_place", "tuple", "dict"])

    def forward(self, x):
        y = self.a(x) if self.kind == "in_place" else torch.tanh(self.a(x))
        if self.b is not None:
            y = self.b(y)
        if self.kind == "residual":
            y = y + x
        if self.kind == "in_place":
            y = y.view(-1)
            y.mul_(0.5)
            y = y.view(2, 8)
        return (y,) if self.kind == "tuple" else {"y": y} if self.kind == "dict" else y


def value_of(output):
    return output[0] if isinstance(output, tuple) else output["y"] if isinstance(output, dict) else output


class Drawn(nn.Module):
    """Up to six blocks: shared, skipped, in another order than they are registered, detached, checkpointed, frozen."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        count = draw.randint(2, 6)
        self.blocks = nn.ModuleList([Block(draw) for _ in range(count)])
        self.head = nn.Linear(8, 1)
        if draw.random() < 0.3:
            self.blocks[-1].a.weight = self.blocks[0].a.weight
        if draw.random() < 0.3:
            self.blocks[draw.randrange(count)].requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(8)) if draw.random() < 0.4 else None
        self.calls = [draw.randrange(count) for _ in range(draw.randint(2, 7))] if draw.random() < 0.5 else list(range(count))
        self.checkpointed = [draw.random() < 0.3 for _ in self.calls]
        self.detached = draw.randrange(len(self.calls)) if draw.random() < 0.2 else -1
        self.two_at_once = draw.random() < 0.2

    def forward(self, x):
        at = 0
        while at < len(self.calls):
            span = 2 if self.two_at_once and at + 1 < len(self.calls) else 1
            blocks = [self.blocks[i] for i in self.calls[at : at + span]]

            def run(y, blocks=blocks):
                for block in blocks:
                    y = value_of(block(y))
                return y

            x = checkpoint(run, x, use_reentrant=False) if self.checkpointed[at] else run(x)
            if at == self.detached:
                x = x.detach()
            if self.scale is not None:
                x = x * self.scale
            at += span
        return self.head(x)


@pytest.mark.parametrize("seed", range(int(FIRST or 0), int(END)))
@on_two
def test_a_module_drawn_by_chance(seed):
    draw = random.Random(1000 + seed)
    accumulate = draw.choice([1, 1, 2])
    settings = config(draw.choice([0, 1, 2, 3, 3, 3]), optimizer=training.SGD, gradient_accumulation_steps=accumulate)
    batches = vector_batches(3, 2 * accumulate, seed=seed)
    compare(lambda: Drawn(seed), batches, squared_error, settings=settings, optimizer=training.SGD, accumulate=accumulate,
            example=(batches[0][0][0],) if draw.random() < 0.5 else None)
