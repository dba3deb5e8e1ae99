"""A loop over `p.grad` between backward and step(): noise, clamping, a norm for the log. The engine has taken the gradients of sharded parameters,
so the loop gets an error that names one, before a number is used. A hook changes a gradient as with torch."""


import pytest
import torch
from pitfalls_test import refused, refused_in_a_thread
from ranks import on_places, on_two
from training import SGD, mlp, squared_error, vector_batches, with_engine, with_torch

import ebb

HALF = [r"[46]\..*"]  # the last two layers are resident


def _gradients(model):
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _each(change):
    def loop(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter)

    return loop


def _noise(parameter):
    parameter.grad += torch.randn_like(parameter)


LOOPS = {
    "noise": _each(_noise),
    "noise into data": _each(lambda parameter: parameter.grad.data.add_(torch.randn(parameter.shape))),
    "clamp": _each(lambda parameter: parameter.grad.clamp_(-1, 1)),
    "scale": _each(lambda parameter: parameter.grad.mul_(0.5)),
    "scaled copy": _each(lambda parameter: setattr(parameter, "grad", parameter.grad * 0.5)),
    "not a number": _each(lambda parameter: torch.nan_to_num_(parameter.grad)),
    "zero": _each(lambda parameter: (parameter.grad.detach_(), parameter.grad.zero_())),
    "none": _each(lambda parameter: setattr(parameter, "grad", None)),
    "none by del": _each(lambda parameter: delattr(parameter, "grad")),
    "zero_grad of a part": lambda model: model[0].zero_grad(),
    "norm": lambda model: sum(gradient.norm() ** 2 for gradient in _gradients(model)) ** 0.5,
    "largest": lambda model: max(gradient.abs().max().item() for gradient in _gradients(model)),
    "finite": lambda model: all(torch.isfinite(gradient).all() for gradient in _gradients(model)),
    "copies": lambda model: [gradient.detach().clone() for gradient in _gradients(model)],
    "vector": lambda model: torch.cat([gradient.view(-1) for gradient in _gradients(model)]),
    "norms at once": lambda model: torch._foreach_norm(_gradients(model)),
    "scaled at once": lambda model: torch._foreach_mul_(_gradients(model), 0.5),
    "total norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")),
    "update by hand": _each(lambda parameter: parameter.data.add_(parameter.grad, alpha=-0.1)),
}
if hasattr(torch.nn.utils, "get_total_norm"):
    LOOPS["get_total_norm"] = lambda model: torch.nn.utils.get_total_norm(_gradients(model))


@pytest.mark.parametrize("options, accumulate", [({}, 1), ({"resident": HALF}, 2)], ids=["all sharded", "some resident"])
@on_places
def test_it_is_refused_by_name(settings, options, accumulate):
    model = mlp()
    engine = ebb.initialize(model, {**settings, "gradient_accumulation_steps": accumulate}, **options)
    batch = vector_batches(1, 2)[0][engine.world.rank]
    for number, loop in enumerate(LOOPS.values()):
        loss = squared_error(model, batch)
        engine.backward(loss) if number % 2 else loss.backward()
        if accumulate > 1 and number % 3:
            assert not engine.step()
        refused(lambda: loop(model), r"'\d\.\w+' .*, at .*loop_over_gradients_test.py.*p.register_hook.*resident=|has written to '0.weight'")
        refused(engine.step, r"'\d\.\w+'.*Call drop")
        engine.drop()
    for _ in range(accumulate):
        engine.backward(squared_error(model, batch))
        engine.step()
    assert engine.report().applied
    engine.close()


@pytest.mark.parametrize("options", [{}, {"resident": HALF}], ids=["all sharded", "some resident"])
@on_two
def test_an_error_on_one_rank_ends_the_step_on_the_other(settings, options):
    model = mlp()
    engine = ebb.initialize(model, settings, **options)
    batch = vector_batches(1, 2)[0][engine.world.rank]
    engine.backward(squared_error(model, batch))
    if engine.world.rank == 1:
        refused(lambda: LOOPS["norm"](model), "the gradient of '0.weight' is read by norm")
    else:
        refused(lambda: (engine.step(), engine.report()), "rank 1.*the gradient of '0.weight' is read by norm")
    engine.drop()
    engine.backward(squared_error(model, batch)), engine.step()
    assert engine.report().applied
    engine.close()


@on_places
def test_grad_is_not_none_until_the_step_ends(settings):
    """Which parameters have a gradient is as with torch: from backward to step(), zero_grad() or drop(), if the loss depends on them."""
    model = mlp()
    model[2].bias.requires_grad_(False)
    engine = ebb.initialize(model, {**settings, "gradient_accumulation_steps": 2})
    batch = vector_batches(1, 2)[0][engine.world.rank]

    def have_gradients():
        return [name for name, parameter in model.named_parameters() if parameter.grad is not None]

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for _ in range(2):
        for micro_batch in range(2):
            assert have_gradients() == (trained if micro_batch else [])
            loss = squared_error(model, batch)
            torch.autograd.grad(loss, model[0].weight, retain_graph=True)
            loss.backward()
            assert have_gradients() == trained
            for parameter in model.parameters():
                if parameter.grad is not None:
                    assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype
                    assert "which the engine has" in repr(parameter.grad)
            engine.step()
        assert have_gradients() == []
    for end in (engine.zero_grad, engine.drop, model.zero_grad):
        squared_error(model, batch).backward()
        assert have_gradients() == trained
        end()
        assert have_gradients() == []
    squared_error(model, batch).backward()
    kept = model[0].weight.grad
    engine.step(now=True)
    refused(lambda: kept.norm(), "the gradient of '0.weight' is read by norm after its step")
    engine.close()


@on_places
def test_a_log_of_another_thread_is_refused_too(settings):
    model = mlp()
    engine = ebb.initialize(model, settings)
    engine.backward(squared_error(model, vector_batches(1, 2)[0][engine.world.rank]))
    refused_in_a_thread(lambda: LOOPS["norm"](model), "the gradient of '0.weight' is read by norm")
    engine.step()
    assert engine.report().applied
    engine.close()


@on_places
def test_hooks_change_gradients_as_with_torch(place):
    """The hooks see the gradients, and the clipping and the update get what they return."""
    models = mlp(), mlp()
    seen = []
    for model in models:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
            parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.isfinite().all().item()))
    batches = place.batches()
    settings = place.config(optimizer=SGD)
    losses, values = with_engine(models[0], batches, squared_error, settings, after=lambda engine: engine.state_dict())
    expected = with_torch(models[1], batches, squared_error, SGD)
    assert losses == pytest.approx(expected, rel=2e-6)
    for name, value in models[1].state_dict().items():
        assert torch.allclose(values[name], value, atol=2e-6), name
    assert seen and all(seen)
