"""Every kind of activation checkpointing, against plain torch: two ranks, stage 3."""

import functools

import ebb
import pytest
import torch
import training
from modules import Blocks
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from training import compare, config, squared_error, vector_batches


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(8, 1)


class Sequential(Body):
    """Two checkpoints over two blocks each."""

    reentrant = False

    def forward(self, x):
        return self.head(checkpoint_sequential(self.blocks, 2, x.requires_grad_(), use_reentrant=self.reentrant))


class SequentialReentrant(Sequential):
    reentrant = True


class LastIsCheckpointed(Body):
    """The first scope of backward is within a reentrant checkpoint."""

    def forward(self, x):
        return checkpoint(lambda y: self.head(self.blocks[3](y)), self.blocks[:3](x), use_reentrant=True)


class Nested(Body):
    def forward(self, x):
        inner = lambda y, block: checkpoint(block, y, use_reentrant=False)
        for block in self.blocks:
            x = checkpoint(inner, x, block, use_reentrant=False)
        return self.head(x)


class ReentrantInside(Body):
    """Two reentrant checkpoints within one that is not: its recompute repeats their forwards without gradients."""

    def forward(self, x):
        def two(y):
            for block in self.blocks[:2]:
                y = checkpoint(block, y, use_reentrant=True)
            return y

        return self.head(self.blocks[2:](checkpoint(two, x.requires_grad_(), use_reentrant=False)))


class DeepInUnits(Body):
    """All that is trained is in reentrant checkpoints, which other operators of their unit follow."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Deep(block) for block in self.blocks)
        self.head.requires_grad_(False)

    def forward(self, x):
        x.requires_grad_()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Deep(nn.Module):
    recomputes = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.sin(x + 2 * (checkpoint(self.inner, x, use_reentrant=True) if self.recomputes else self.inner(x))) + 1


class Selective(Body):
    def forward(self, x):
        saves_products = lambda context, operator, *arguments, **keywords: (
            CheckpointPolicy.MUST_SAVE if operator == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
        )
        contexts = functools.partial(create_selective_checkpoint_contexts, saves_products)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)


class OnTheHost(Body):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return self.head(self.blocks(x))


class Recomputed(torch.autograd.Function):
    """x + block(x), with a backward that computes the block again, as reversible networks do."""

    @staticmethod
    def forward(context, x, block):
        context.block = block
        context.save_for_backward(x)
        return x + block(x)

    @staticmethod
    def backward(context, gradient):
        with torch.enable_grad():
            x = context.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(x + context.block(x), gradient)
        return x.grad, None


class OwnFunction(Body):
    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = Recomputed.apply(x, block)
        return self.head(x)


def _train(kind, loss_of, shown):
    batches = vector_batches(4, 2)
    example = (lambda model: loss_of(model, batches[0][0])) if shown else None
    compare(kind, batches, loss_of, optimizer=training.SGD, settings=config(optimizer=training.SGD), example=example)


@pytest.mark.parametrize(
    "kind", [Sequential, SequentialReentrant, LastIsCheckpointed, Nested, ReentrantInside, DeepInUnits, Selective, OnTheHost, OwnFunction]
)
@pytest.mark.parametrize("shown", [False, True])
def test_a_kind_of_checkpoint(two, kind, shown):
    two.run(_train, kind, squared_error, shown)


def _switches_on():
    batches = vector_batches(4, 2)
    model, plain = DeepInUnits(), DeepInUnits()
    engine = ebb.initialize(model, config(optimizer=training.SGD))
    for block in model.blocks:
        block.recomputes = False
    expected = training.with_torch(plain, batches, squared_error, training.SGD)
    for number, step in enumerate(batches):
        if number == 2:
            for block in model.blocks:
                block.recomputes = True
            engine.backward(squared_error(model, step[engine.world.rank]))
            with pytest.raises(ebb.Error, match="switched on since the first step, call drop"):
                engine.step()
            engine.drop()
        engine.backward(squared_error(model, step[engine.world.rank]))
        engine.step()
        assert engine.report().loss == pytest.approx(expected[number], rel=1e-5)
    engine.close()


def test_reentrant_checkpoints_are_switched_on_later(two):
    two.run(_switches_on)


def _around_the_model(reentrant, model, batch):
    x, y = batch
    return (checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant) - y).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_a_checkpoint_around_the_model(two, reentrant, shown):
    two.run(_train, Blocks, functools.partial(_around_the_model, reentrant), shown)
