"""torch.autograd.grad beside training: adversarial examples, gradients of inputs and of parameters for a log. A backward that gives no
parameter a gradient is no micro-batch."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from modules import Checkpointed
from pitfalls_test import refused
from ranks import on_places
from torch import nn
from training import mlp, squared_error, vector_batches

import ebb

ACCUMULATE = 2


def _attacked(model, batch):
    """Two steps along the gradient of the input."""
    x, y = batch
    for _ in range(2):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(squared_error(model, (x, y)), x)
        x = x + 0.1 * gradient.sign()
    return squared_error(model, (x.detach(), y))


def _attacked_with_frozen_parameters(model, batch):
    x, y = batch
    x = x.clone().requires_grad_()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    squared_error(model, (x, y)).backward()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return squared_error(model, (x.detach() + 0.1 * x.grad.sign(), y))


def _validated_in_between(model, batch):
    x, y = batch
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(squared_error(model, (x, y)), x)
    with torch.no_grad():
        worse = squared_error(model, (x + 0.1 * gradient.sign(), y))
    return squared_error(model, batch) * (1 + worse)


def _same_forward(model, batch):
    """Weighted by the size of the input's gradient, and by that of a parameter's."""
    x, y = batch
    x = x.clone().requires_grad_()
    loss = squared_error(model, (x, y))
    weight = next(parameter for parameter in model.parameters() if parameter.dim() == 2)
    of_input, of_parameter = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    return loss * (1 + of_input.norm() + of_parameter.norm())


def _of_a_hidden_layer(model, batch):
    taken = []
    middle = list(model.children())[1]
    handle = middle.register_forward_hook(lambda module, arguments, output: taken.append(output))
    loss = squared_error(model, batch)
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, taken)
    return squared_error(model, batch) * (1 + gradient.norm())


def _uncheckpointed():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)], nn.Linear(8, 1))


LOSSES = [_attacked, _attacked_with_frozen_parameters, _validated_in_between, _same_forward, _of_a_hidden_layer, squared_error]


@pytest.mark.parametrize(
    "make, losses", [(_uncheckpointed, LOSSES), (Checkpointed, [_attacked, _same_forward, squared_error])], ids=["", "with gradient checkpoints"]
)
@on_places
def test_it_is_no_micro_batch(settings, make, losses):
    model, plain = make(), make()
    engine = ebb.initialize(model, {**settings, "gradient_accumulation_steps": ACCUMULATE})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ranks, rank = engine.world.size, engine.world.rank
    for loss_of in losses:
        of_step = vector_batches(1, ranks * ACCUMULATE, seed=len(loss_of.__name__))[0]
        for number, batch in enumerate(of_step):
            (loss_of(plain, batch) / len(of_step)).backward()
            if number // ACCUMULATE == rank:
                engine.backward(loss_of(model, batch))
                assert engine.step() == (number % ACCUMULATE == ACCUMULATE - 1)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.gather(name), value, atol=5e-6), f"{loss_of.__name__}: {name}"
    x, y = vector_batches(1, 1)[0][0]
    refused(lambda: torch.autograd.grad(squared_error(model, (x.requires_grad_(), y)), x, create_graph=True), "create_graph=True", "UNIMPLEMENTED")
    engine.drop()
    _validated_in_between(model, (x.detach(), y))  # its forward is dropped with what the step has
    engine.drop()
    x = x.detach().requires_grad_()
    torch.autograd.grad(squared_error(model, (x, y)), x)
    engine.state_dict()
    assert not engine._steps.in_step  # an attack alone leaves no step behind
    engine.close()


def _virtual_adversary(model, batch):
    """The loss of a forward before the attack, and of one after it."""
    x, _ = batch
    clean = model(x)
    noise = torch.full_like(x, 0.1).requires_grad_()
    distance = (model(x + noise) - clean.detach()).square().mean()
    (gradient,) = torch.autograd.grad(distance, noise)
    return squared_error(model, batch) * 0 + clean.square().mean() + (model(x + gradient) - clean).square().mean()


@on_places
def test_an_example_may_have_it_too(settings):
    batch = vector_batches(1, 1)[0][0]
    for loss_of in (_attacked, _virtual_adversary):
        model = mlp()
        plain = copy.deepcopy(model)
        engine = ebb.initialize(model, settings, example=lambda model: loss_of(model, batch))
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(2):
            engine.backward(loss_of(model, batch)), engine.step()
            loss_of(plain, batch).backward()
            optimizer.step(), optimizer.zero_grad()
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.gather(name), value, atol=5e-6), f"{loss_of.__name__}: {name}"
        engine.close()


WITH_ATTACKS = """
import ebb, torch, training
from gradient_of_inputs_test import _attacked
model = training.mlp()
engine = ebb.initialize(model, training.config())
for batch, in training.vector_batches(2, 1):
    engine.backward(_attacked(model, batch)), engine.step()
assert engine.report().applied
"""


def test_no_warning_tells_to_declare_it():
    folders = [*sys.path, os.path.dirname(__file__)]
    environment = {**os.environ, "EBB_LOG_LEVEL": "warn", "PYTHONPATH": os.pathsep.join(folders)}
    ended = subprocess.run([sys.executable, "-c", WITH_ATTACKS], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and "declared order" not in ended.stderr, ended.stderr
