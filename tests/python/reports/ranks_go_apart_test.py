"""Ranks whose loops go apart at stage 3, where each waits for the other in another collective: all of them get the error long before the
time-out, which is the default."""

import pytest
import torch
from modules import Blocks, FailsInBackward
from ranks import on_two
from torch import nn
from training import config, squared_error, vector_batches

import ebb

X, Y = vector_batches(1, 1)[0][0]


@on_two
def test_a_different_number_of_forwards_without_gradients():
    engine = ebb.initialize(Blocks(), config())
    with pytest.raises(ebb.Error, match=r"ranks opened different scopes: as number \d+ of the step rank 0 opened nothing more, rank 1 Forward\('"):
        with torch.no_grad():
            for _ in range(3 + 2 * engine.world.rank):
                engine.model(X)
        engine.state_dict()
    engine.close()


def _generate(engine, tokens):
    """Each token follows from the last one, and the rank's own text is at its end after so many."""
    x = X
    with torch.no_grad():
        for _ in range(tokens):
            x = x + engine.model(x).mean()
    return x


@on_two
def test_generation_that_ends_at_different_tokens():
    engine = ebb.initialize(Blocks(), config())
    _generate(engine, 4)
    with pytest.raises(ebb.Error, match="ranks (opened different scopes|do different things).*Forward"):
        _generate(engine, 2 if engine.world.rank == 0 else 6)
        engine.backward(squared_error(engine.model, (X, Y)))
        engine.step()
    engine.close()


class Deep(Blocks):
    """More blocks than are gathered ahead."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(12)])


def _drops_alone():
    engine = ebb.initialize(Deep(), config(ebb={"coalesce": 1}))
    fails = engine.world.rank == 1
    with pytest.raises(ebb.Error, match=r"ranks do different things with the engine '.*': rank 1 dropped .* where rank 0 opened Backward\('"):
        if fails:
            handle = engine.model.blocks[9].register_forward_hook(lambda module, arguments, output: FailsInBackward.apply(output))
            with pytest.raises(ValueError):
                squared_error(engine.model, (X, Y)).backward()
            handle.remove()
            engine.drop()
        for _ in range(2):
            squared_error(engine.model, (X, Y)).backward()
            engine.step()
        engine.report()
    engine.close()


def test_drop_on_the_one_rank_whose_backward_has_raised(two):
    two.run(_drops_alone)
    two.stop()  # the ranks' calls differ, so their world has failed
