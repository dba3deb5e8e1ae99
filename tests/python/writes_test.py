"""What the trainer's own code writes to a parameter is refused by name, or holds: nothing is lost in silence."""

import functools

import pytest
import torch
import training
from pitfalls_test import refused
from ranks import on_two
from torch import nn
from training import SGD, config, squared_error, vector_batches

import ebb

BATCHES = vector_batches(3, 2)
WRITTEN = r"the trainer's own code has written to '{}'.*engine.write"


class Gated(nn.Module):
    """A resident parameter between its blocks, and parameters of one element inside of them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.gate = nn.Parameter(torch.tensor(0.5))
            self.slope = nn.PReLU()

        def forward(self, x):
            return self.slope(self.linear(x)) * self.gate

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.scale = nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


def train(model, engine, step):
    engine.backward(squared_error(model, BATCHES[step][engine.world.rank]))
    assert engine.step()


@pytest.mark.parametrize("stage", [0, 3])
@on_two
def test_a_write_that_the_engine_does_not_see_is_an_error_that_names_the_parameter(stage):
    model = Gated()
    engine = ebb.initialize(model, config(stage, optimizer=SGD))
    train(model, engine, 0)
    before = engine.state_dict()

    def clamp():
        with torch.no_grad():
            model.blocks[1].slope.weight.clamp_(max=0.1)

    writes = {
        "scale": lambda: model.scale.data.clamp_(max=0.1),
        "head.weight": lambda: setattr(model.head.weight, "data", torch.ones(1, 8)),
    }
    model.scale.data.copy_(before["scale"].flip(0))
    refused(lambda: model(BATCHES[0][0][0]), WRITTEN.format("scale"))
    engine.drop()
    for name, write in writes.items():
        write()
        refused(lambda: model(BATCHES[0][0][0]), WRITTEN.format(name))
        engine.drop()
        write()
        refused(lambda: engine.save("nowhere"), WRITTEN.format(name))
        with torch.no_grad():  # goes on with what the engine has
            assert model(BATCHES[0][0][0]).isfinite().all()
    at_once = {
        "blocks.0.gate": lambda: model.blocks[0].gate.data.fill_(1.0),
        "blocks.1.gate": lambda: model.blocks[1].gate.data.clamp_(max=0.1),
        "blocks.1.slope.weight": clamp,
        "head.weight": lambda: nn.init.uniform_(model.head.weight),
        "head.bias": lambda: torch._foreach_mul_([model.head.bias], 2.0),
    }
    for name, write in at_once.items():
        refused(write, WRITTEN.format(name))
    loss = squared_error(model, BATCHES[1][engine.world.rank])
    engine.backward(loss)
    model.scale.data.zero_()
    refused(engine.step, WRITTEN.format("scale"))
    engine.drop()
    for name, value in engine.state_dict().items():
        assert torch.equal(value, before[name]), name
    engine.close()


@on_two
def test_a_resident_parameter_shows_what_the_engine_has():
    """Resident parameters show the value of the newest forward, or of the last call that gave them one."""
    model = Gated()
    engine = ebb.initialize(model, config(optimizer=SGD), values_of_rank_0=True)
    assert torch.equal(model.scale.data, engine.gather("scale"))
    for step in range(3):
        train(model, engine, step)
        with torch.no_grad():
            model(BATCHES[0][0][0])
        assert torch.equal(model.scale.data, engine.gather("scale"))
    for value in (torch.full((8,), 0.25), torch.full((8,), 0.75)):
        engine.write("scale", value)
        assert torch.equal(model.scale.data, value)
    engine.suspend()
    engine.resume()
    assert torch.equal(model.scale.data, value)
    engine.close()


@on_two
def test_resident_parameters_and_those_of_one_element_learn_as_in_torch():
    training.compare(Gated, BATCHES, squared_error, optimizer=SGD)


class _Constrained(nn.Linear):
    """Limits its weight in forward, as models for EEG do."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.1)
        return super().forward(x)


class _Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class _Masked(nn.Linear):
    """Masks its weight in forward, as autoregressive models do."""

    masks = False

    def forward(self, x):
        if self.masks:
            self.weight.data.mul_(torch.eye(8))
        return super().forward(x)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "make", [functools.partial(_Constrained, 8, 8), functools.partial(_Clamped, 8, 8), functools.partial(nn.Embedding, 4, 8, max_norm=0.1)]
)
@on_two
def test_a_module_that_writes_to_its_own_parameter_is_refused(make, stage):
    torch.manual_seed(2)
    model = nn.Sequential(make(), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 1))
    engine = ebb.initialize(model, config(stage, optimizer=SGD))
    ids = torch.zeros(2, 1, dtype=torch.long)
    x = ids if isinstance(model[0], nn.Embedding) else torch.ones(2, 8)
    refused(lambda: model(x), WRITTEN.format("0.weight"))
    engine.drop()
    again = WRITTEN.format("0.weight") if isinstance(model[0], _Constrained) else "changed values of '0.weight' in place.*make a new engine"
    with torch.no_grad():
        for _ in range(3):  # each leaves no scope open
            refused(lambda: model(x), again)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_two
def test_a_write_through_data_in_forward_is_refused_in_the_forwards_that_are_watched(stage):
    for clean in (0, 2, 63):
        torch.manual_seed(2)
        model = nn.Sequential(_Masked(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
        engine = ebb.initialize(model, config(stage, optimizer=SGD))
        x = torch.ones(2, 8)
        with torch.no_grad():
            for _ in range(clean):
                model(x)
        model[0].masks = True
        with torch.set_grad_enabled(clean == 2):
            refused(lambda: model(x), WRITTEN.format("0.weight"))
        engine.drop()
        refused(lambda: model(x), "changed values of '0.weight' in place.*make a new engine")
        engine.close()


@pytest.mark.parametrize("stage", [0, 3])
@on_two
def test_a_write_through_data_in_backward_is_refused(stage):
    for hook in (
        lambda model: model[0].register_full_backward_hook(lambda module, *_: (module.weight.data.clamp_(-0.05, 0.05), None)[1]),
        lambda model: model[0].weight.register_hook(lambda gradient: (model[0].weight.data.mul_(0.5), None)[1]),
    ):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
        engine = ebb.initialize(model, config(stage, optimizer=SGD))
        hook(model)
        loss = squared_error(model, BATCHES[0][engine.world.rank])
        refused(lambda: engine.backward(loss), WRITTEN.format("0.weight"))
        engine.close()
