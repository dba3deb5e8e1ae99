"""What one rank alone meets, by its data or its own code, ends the call on every rank with its words; after drop() all of them train on."""

import contextlib
from dataclasses import replace

import pytest
import torch
from modules import Blocks, FailsInBackward
from places import ON_NVME, Place
from ranks import on_places, on_two
from torch import nn
from training import SGD, config, squared_error, vector_batches, with_torch

import ebb

X, Y = vector_batches(1, 1)[0][0]
TWO = Place("two ranks", 2)


def in_forward(model, engine):
    with removed(model.blocks[1].register_forward_pre_hook(lambda module, arguments: {}["no such key"])):
        model(X)


def before_the_first_unit(model, engine):
    with removed(model.register_forward_pre_hook(lambda module, arguments: {}["no such key"])):
        model(X)


def in_backward(model, engine):
    with removed(model.blocks[1].register_forward_hook(lambda module, arguments, output: FailsInBackward.apply(output))):
        engine.backward(squared_error(model, (X, Y)))


def in_the_losses_backward(model, engine):
    with removed(model.blocks[1].register_forward_hook(lambda module, arguments, output: FailsInBackward.apply(output))):
        try:
            squared_error(model, (X, Y)).backward()
        except ValueError:  # the engine has not seen it
            engine.step()


def with_second_derivatives(model, engine):
    torch.autograd.grad(squared_error(model, (X, Y)), list(model.parameters()), create_graph=True)


def with_another_parameter(model, engine):
    model.extra = nn.Parameter(torch.ones(3))
    try:
        model(X)
    finally:
        del model.extra


def reading_a_hidden_parameter(model, engine):
    engine.backward(squared_error(model, (X, Y)) + model.head.weight.detach().sum())


class Deep(Blocks):
    """More blocks than are gathered ahead."""

    def __init__(self):
        super().__init__()
        self.blocks.extend([nn.Linear(8, 8) for _ in range(6)])


FAILURES = {
    in_forward: (KeyError, "rank 1: KeyError: 'no such key'"),
    before_the_first_unit: (KeyError, "rank 1: KeyError: 'no such key'"),
    in_backward: (ValueError, "rank 1: ValueError: in backward"),
    in_the_losses_backward: (ebb.Error, "rank 1: .*step.. after a backward that ended with an error"),
    with_second_derivatives: (ebb.Error, "rank 1: .*create_graph=True"),
    with_another_parameter: (ebb.Error, "rank 1: .*'extra' came into the model"),
    reading_a_hidden_parameter: (ebb.Error, "rank 1: .*'head.weight' is read by sum outside of its unit"),
}


@contextlib.contextmanager
def removed(handle):
    try:
        yield
    finally:
        handle.remove()


def train(model, engine, batch):
    engine.backward(squared_error(model, batch))
    assert engine.step()
    return engine.report().loss


@pytest.mark.parametrize("at", [TWO, ON_NVME], indirect=True, ids=lambda place: place.name)
@on_places
def test_a_step_ends_on_all_ranks_and_training_goes_on(place):
    batches = place.batches(1 + len(FAILURES))
    settings = place.config(optimizer=SGD, ebb={"timeout_seconds": 200})
    expected = with_torch(Blocks(), batches, squared_error, SGD)
    model = Blocks()
    engine = ebb.initialize(model, settings)
    losses = [train(model, engine, batches[0][engine.world.rank])]
    for (fail, (kind, text)), of_step in zip(FAILURES.items(), batches[1:]):
        if engine.world.rank == 1:
            with pytest.raises(kind):
                fail(model, engine)
        else:
            with pytest.raises(ebb.Error, match=text):
                train(model, engine, (X, Y))
        engine.drop()
        losses.append(train(model, engine, of_step[engine.world.rank]))
    assert losses == pytest.approx(expected, abs=2e-6)
    engine.close()


@on_two
def test_a_loop_that_does_not_drop_gets_an_error_for_each_batch():
    """A loop that catches all exceptions and takes the next batch."""
    model = Blocks()
    engine = ebb.initialize(model, config(ebb={"timeout_seconds": 200}))
    train(model, engine, (X, Y))
    for _ in range(2):
        try:
            in_forward(model, engine) if engine.world.rank == 1 else train(model, engine, (X, Y))
            raise AssertionError("no error")
        except (KeyError, ebb.Error) as error:
            assert "no such key" in str(error)
    engine.drop()
    train(model, engine, (X, Y))
    engine.close()


@on_two
def test_a_model_that_one_rank_refuses():
    model = Blocks()
    rank = ebb.world().rank
    if rank == 1:
        model.blocks[1]._hf_hook = object()
    with pytest.raises(ebb.Error, match="^'blocks.1' has hooks of accelerate" if rank == 1 else "rank 1: Error: 'blocks.1' has hooks of accelerate"):
        ebb.initialize(model, config(ebb={"timeout_seconds": 200}))
    with pytest.raises(FileNotFoundError if rank == 1 else ebb.Error, match="no_such_file" if rank == 1 else "rank 1: .*no_such_file"):
        ebb.initialize(Blocks(), config() if rank == 0 else "/no_such_file.json")
    with pytest.raises(ebb.Error, match="bf17" if rank == 1 else "rank 1: .*bf17"):
        ebb.initialize(Blocks(), config(ebb={"timeout_seconds": 200}, **({"bf17": {}} if rank == 1 else {})))
    engine = ebb.initialize(Blocks(), config())
    train(engine.model, engine, (X, Y))
    engine.close()


@on_two
def test_a_loader_that_raises_on_one_rank():
    """It raises within `with engine:`."""
    with pytest.raises((OSError, ebb.Error)) as caught:
        with ebb.initialize(Blocks(), config(ebb={"timeout_seconds": 200})) as engine:
            train(engine.model, engine, (X, Y))
            if engine.world.rank == 1:
                raise OSError("no such image")
            train(engine.model, engine, (X, Y))
    assert str(caught.value) == ("no such image" if engine.world.rank == 1 else "rank 1: OSError: no such image")


def in_a_unit(model, engine):
    with removed(model.blocks[1].register_forward_hook(lambda module, arguments, output: {}["no such key"])):
        model(X)


@pytest.mark.parametrize("at, kind", [(TWO, Blocks), (replace(ON_NVME, zero={"stage3_prefetch_bucket_size": 0}), Deep)], indirect=["at"])
@on_places
def test_a_validation_that_raises_on_one_rank(place, kind):
    """The other rank gets the error when its own evaluation ends."""
    batches = place.batches(6)
    expected = with_torch(kind(), batches, squared_error, SGD)
    model = kind()
    engine = ebb.initialize(model, place.config(optimizer=SGD, ebb={"timeout_seconds": 100}))
    losses = [train(model, engine, batches[0][engine.world.rank])]
    for fail in (in_forward, in_a_unit, before_the_first_unit, before_the_first_unit, in_a_unit):
        with torch.no_grad():
            if engine.world.rank == 1:
                with pytest.raises(KeyError):
                    fail(model, engine)
            else:
                model(X)
                with pytest.raises(ebb.Error, match="rank 1: KeyError: 'no such key'"):
                    engine.state_dict()
        losses.append(train(model, engine, batches[len(losses)][engine.world.rank]))
    assert losses == pytest.approx(expected, abs=2e-6)
    engine.close()
