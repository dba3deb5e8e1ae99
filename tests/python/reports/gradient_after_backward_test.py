"""A gradient that the loop puts into `.grad` itself: a penalty with a backward of its own, noise, a value by hand. It counts in its step, as
with torch, or is an error before the step ends."""

import copy

import pytest
import torch
from pitfalls_test import refused
from ranks import on_one, on_places, on_two
from training import mlp, squared_error, vector_batches

import ebb

ACCUMULATE = 2
LAST = "6.weight"  # resident
INNER = "2.weight"  # sharded


def _penalty(model):
    model.get_parameter(LAST).pow(2).sum().backward()


def _noise(model):
    for parameter in model.parameters():
        if parameter is model.get_parameter(LAST) and parameter.grad is not None:
            parameter.grad += torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)


def _halved(model):
    model.get_parameter(LAST).grad.mul_(0.5)


def _by_hand(model):
    model.get_parameter(LAST).grad = torch.full((1, 8), 0.25)


def _evaluated(change):
    def after(model):
        with torch.no_grad():
            model(torch.ones(2, model[0].in_features))
        change(model)

    return after


def nothing(model):
    pass


class _Pair:
    """A model with an engine, and torch's over the batches of all ranks."""

    def __init__(self, settings, **options):
        self.model = mlp()
        self.plain = copy.deepcopy(self.model)
        self.engine = ebb.initialize(self.model, {**settings, "gradient_accumulation_steps": ACCUMULATE}, **options)
        self.ranks = self.engine.world.size
        self.steps = vector_batches(24, self.ranks * ACCUMULATE)

    def step(self, before=nothing, between=nothing, after=nothing, at=0):
        """One step with these calls at the micro-batch `at`. In torch, gradients are the mean over ranks and micro-batches."""
        of_step = self.steps.pop()
        sums = [torch.zeros_like(parameter) for parameter in self.plain.parameters()]
        for rank in range(self.ranks):
            for number in range(ACCUMULATE):
                calls = (before, between, after) if number == at else (nothing,) * 3
                self.plain.zero_grad()
                self._micro_batch(self.plain, of_step[rank * ACCUMULATE + number], calls, lambda loss: loss.backward())
                for total, parameter in zip(sums, self.plain.parameters()):
                    total += parameter.grad / (self.ranks * ACCUMULATE)
                if rank == self.engine.world.rank:
                    self._micro_batch(self.model, of_step[rank * ACCUMULATE + number], calls, self.engine.backward)
                    self.engine.step()
        with torch.no_grad():
            for total, parameter in zip(sums, self.plain.parameters()):
                parameter -= 0.1 * total
        self.check()

    def _micro_batch(self, model, batch, calls, backward):
        before, between, after = calls
        before(model)
        loss = squared_error(model, batch)
        between(model)
        backward(loss)
        after(model)

    def check(self):
        for name, value in self.plain.state_dict().items():
            assert torch.allclose(self.engine.gather(name), value, atol=2e-6), name


@on_places
def test_it_counts_in_its_step_if_the_parameter_is_resident(settings):
    pair = _Pair(settings, resident=[r"6\..*"])
    for change in (_penalty, _noise, _halved, _by_hand):
        for at in range(ACCUMULATE):
            pair.step(after=change, at=at)
    for change in (_penalty, _halved):
        for at in range(ACCUMULATE):
            pair.step(after=_evaluated(change), at=at)
    pair.step(before=_by_hand)
    for change in (_penalty, _by_hand):
        pair.step(between=change)
    _penalty(pair.model)
    pair.engine.zero_grad()
    pair.step()
    engine = pair.engine
    engine.backward(squared_error(pair.model, pair.steps[0][0]))
    _penalty(pair.model)
    engine.zero_grad()  # drops the step, because no step() has counted the backward
    pair.step()
    engine.backward(squared_error(pair.model, pair.steps[0][0]))
    engine.step()
    engine.backward(squared_error(pair.model, pair.steps[0][0]))
    refused(engine.zero_grad, r"after 1 micro-batch.*drop\(\)")
    engine.drop()
    with torch.no_grad():
        pair.model(pair.steps[0][0][0])
    engine.backward(squared_error(pair.model, pair.steps[0][0]))
    engine.step()
    _penalty(pair.model)
    refused(lambda: engine.step(now=True), f"'{LAST}' has got a gradient after the step.. that counted the last backward")
    engine.drop()
    pair.step(after=_penalty)
    engine.close()


@on_places
def test_if_it_comes_too_late_for_a_sharded_parameter_that_is_an_error(settings):
    pair = _Pair(settings)
    engine, model = pair.engine, pair.model
    gradient = 0.0

    def by_hand(model):  # of a penalty on the gathered value
        model.get_parameter(INNER).grad = gradient.clone()

    for at in range(ACCUMULATE):
        value = engine.gather(INNER).requires_grad_()
        value.pow(2).sum().backward()
        gradient = value.grad
        pair.step(before=by_hand, at=at)
        pair.step(between=by_hand, at=at)

    def hidden(model):
        model.get_parameter(INNER).pow(2).sum().backward()

    engine.backward(squared_error(model, pair.steps[0][0]))
    by_hand(model)
    refused(engine.step, f"'{INNER}' has got a gradient after the backward of its unit '2'.*resident=")
    engine.zero_grad()
    pair.step()
    refused(lambda: hidden(model), f"'{INNER}' is read by pow outside of its unit.*resident=")
    engine.backward(squared_error(model, pair.steps[0][0]))
    refused(lambda: hidden(model), f"'{INNER}' is read by pow outside of its unit.*resident=")
    refused(engine.step, f"'{INNER}' is read by pow.*drop")
    engine.drop()
    pair.step()
    engine.close()


@on_two
def test_an_error_of_step_on_one_rank_reaches_the_other_and_training_goes_on(settings):
    pair = _Pair(settings)
    engine, model = pair.engine, pair.model
    engine.backward(squared_error(model, pair.steps[0][0]))
    text = f"'{INNER}' has got a gradient after the backward"
    if engine.world.rank == 1:
        model.get_parameter(INNER).grad = torch.ones(8, 8)
        refused(lambda: engine.step(now=True), text)
    else:
        refused(lambda: (engine.step(now=True), engine.report()), f"rank 1.*{text}")
    engine.drop()
    pair.step()
    engine.close()


@on_one
def test_with_fp16_a_penalty_is_scaled_too(settings):
    model = mlp()
    engine = ebb.initialize(model, {**settings, "fp16": {"enabled": True, "loss_scale": 1024}}, resident=[r"6\..*"])
    x, y = vector_batches(1, 1)[0][0]
    values = []
    for penalty in (lambda: None, lambda: engine.backward(model.get_parameter(LAST).float().pow(2).sum())):
        before = engine.gather(LAST, master=True)
        engine.backward(squared_error(model, (x.half(), y.half())))
        penalty()
        engine.step()
        values.append((engine.gather(LAST, master=True) - before, before))
        engine.load_state_dict(mlp().state_dict())
    (plain, before), (penalised, _) = values
    assert torch.allclose(penalised - plain, -0.1 * 2 * before, rtol=1e-2, atol=1e-4)
    engine.backward(squared_error(model, (x.half(), y.half())))
    refused(lambda: _penalty(model), "with fp16 the loss has to be scaled")
    engine.close()
