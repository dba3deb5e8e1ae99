"""A forward without gradients, of a reference, beside those of a step: before the policy's, between them or after, in each micro-batch or in one."""

import pytest
import torch
from ranks import on_places
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import SGD, compare


class Policy(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(8))  # resident
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.recomputes = recomputes

    def forward(self, x):
        if self.recomputes == "reentrant":
            x = x.clone().requires_grad_()
        x = x * self.scale
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.recomputes == "reentrant") if self.recomputes else block(x))
        return self.head(x)


class Loss:
    """`only_second`: of two micro-batches, the second has a reference. Engine and torch begin with the first."""

    def __init__(self, where, only_second):
        self.where = where
        self.only_second = only_second
        self.calls = 0

    def __call__(self, model, batch, shown=False):
        x, y = batch
        self.calls += not shown
        has_reference = not self.only_second or (not shown and self.calls % 2 == 0)

        def reference():
            with torch.no_grad():
                return model(-x)

        before = reference() if has_reference and self.where == "before" else 0
        output = model(x)
        if self.where == "between":
            before = reference() if has_reference else 0
            output = output + model(x / 2)
        after = reference() if has_reference and self.where == "after" else 0
        return (output - y + 0.1 * (before + after)).square().mean()


@pytest.mark.parametrize("recomputes", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("where", ["before", "between", "after"])
@on_places
def test_numbers_are_those_of_torch(place, where, recomputes):
    batches = place.batches(3, accumulate=2)
    for only_second in (False, True):
        loss_of = Loss(where, only_second)
        for shown in (True, False) if where != "between" else (True,):
            compare(lambda: Policy(recomputes), batches, loss_of, place.config(optimizer=SGD, gradient_accumulation_steps=2), optimizer=SGD,
                    accumulate=2, example=(lambda model: loss_of(model, batches[0][0], shown=True)) if shown else None)
