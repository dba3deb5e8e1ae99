"""A loss that reads a parameter of a closed unit: an error names it where it is read, also if autograd does not see the parameter."""

import torch
import torch.nn.functional as F
from modules import Blocks
from pitfalls_test import refused
from ranks import on_places, on_two
from training import SGD, compare, config, squared_error, vector_batches

import ebb


def _frozen():
    model = Blocks()
    model.head.requires_grad_(False)
    return model


def _logits(model, weight, batch):
    x, y = batch
    return F.linear(model(x).expand(len(x), 8), weight)


def of_linear(model, batch):
    return _logits(model, model.head.weight, batch).square().mean()


def detached(model, batch):
    return _logits(model, model.head.weight.detach(), batch).square().mean()


def cast(model, batch):
    hidden = model(batch[0]).expand(len(batch[0]), 8)
    return F.linear(hidden, model.head.weight.data.double().float()).square().mean()


def added(model, batch):
    return (model(batch[0]) + model.head.weight).square().mean()


def within_a_device(model, batch):
    with torch.device("cpu"):
        output = model(batch[0])
    return (output * model.head.weight).square().mean()


READ = r"'head.weight' is read by \w*{} outside of its unit, at .*loss_reads"


@on_places
def test_the_parameter_is_named_where_it_is_read(place):
    batch = place.batches()[0][0]
    for make, loss_of, what in (
        (_frozen, of_linear, "linear"), (Blocks, detached, "linear"), (_frozen, cast, "double"), (_frozen, added, "__r?add__|add"),
        (_frozen, within_a_device, "__r?mul__|mul"),
    ):
        model = make()
        engine = ebb.initialize(model, place.config(gradient_clipping=0))
        refused(lambda: loss_of(model, batch), READ.format(f"({what})"))
        refused(engine.step, "'head.weight' is read by")
        engine.drop()
        squared_error(model, batch).backward()
        engine.step()
        assert engine.report().applied
        engine.close()


@on_places
def test_a_read_in_a_later_step_is_named(place):
    """In a later step, in the first of two micro-batches."""
    batch = place.batches()[0][0]
    model = _frozen()
    engine = ebb.initialize(model, place.config(gradient_accumulation_steps=2))
    for _ in range(8):
        engine.backward(model(batch[0]).square().mean()), engine.step()
    refused(lambda: of_linear(model, batch), READ.format("linear"))
    engine.drop()
    for _ in range(2):
        engine.backward(model(batch[0]).square().mean()), engine.step()
    assert engine.report().applied
    engine.close()


@on_two
def test_a_read_on_one_rank_ends_the_step_on_the_other():
    batch = vector_batches(1, 1)[0][0]
    model = _frozen()
    engine = ebb.initialize(model, config())
    for _ in range(2):
        engine.backward(model(batch[0]).square().mean()), engine.step()
    if engine.world.rank == 1:
        refused(lambda: of_linear(model, batch), READ.format("linear"))
    else:
        refused(lambda: (engine.backward(model(batch[0]).square().mean()), engine.step(), engine.report()), "rank 1.*'head.weight' is read by linear")
    engine.drop()
    engine.backward(model(batch[0]).square().mean()), engine.step()
    assert engine.report().applied
    engine.close()


BEFORE = {
    "clone": lambda weight: weight.detach().clone(),
    "to": lambda weight: weight.to(torch.bfloat16).float(),
    "norm": lambda weight: weight / weight.norm(),
}


@on_places
def test_a_read_before_the_forward_is_named(place):
    batch = place.batches()[0][0]
    model = _frozen()
    engine = ebb.initialize(model, place.config())
    for steps in (0, 3):  # and behind an evaluation
        for _ in range(steps):
            engine.backward(squared_error(model, batch)), engine.step()
        if steps:
            with torch.no_grad():
                model(batch[0])
        for what, value_of in BEFORE.items():
            refused(lambda: value_of(model.head.weight), READ.format(what))
    engine.backward(squared_error(model, batch)), engine.step()
    assert engine.report().applied
    engine.close()


@on_places
def test_a_resident_head_has_the_numbers_of_torch(place):
    batches = place.batches()
    harmless = lambda model, batch: model(batch[0]).square().mean() * model.head.weight.shape[1] / model.head.weight.numel()
    compare(_frozen, batches, harmless, place.config(optimizer=SGD), optimizer=SGD)
    for loss_of in (of_linear, detached, cast):
        compare(_frozen, batches, loss_of, place.config(optimizer=SGD), optimizer=SGD, resident=["head.weight"])
    compare(_frozen, batches, of_linear, place.config(optimizer=SGD), optimizer=SGD, example=lambda model: of_linear(model, batches[0][0]))
