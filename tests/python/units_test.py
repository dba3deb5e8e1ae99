"""Which parameters are one unit, and in which order units are visited."""

import pytest
import torch
from torch import nn
from training import gpt2, llama, mlp, token_batches

from ebb import Error
from ebb._fakes import Fakes
from ebb._order import observe, of_registration
from ebb._units import divide

CPU = torch.device("cpu")


def names(model, **options):
    return [unit.name for unit in divide(model, **options)]


def test_members_of_lists_are_units_and_what_is_between_them_is_joined():
    assert names(llama()) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm+lm_head"]
    assert names(mlp()) == ["0", "2", "4", "6"]


def test_a_tied_head_is_one_unit_with_the_table():
    units = divide(gpt2())
    assert units[0].names == ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert sum(len(unit.parameters) for unit in units) == len(list(gpt2().parameters()))


def test_units_are_named_by_class_module_path_or_function():
    model = llama()
    for units in (["LlamaMLP"], [layer.mlp for layer in model.model.layers], lambda path, module: path.endswith("mlp")):
        found = [unit for unit in divide(model, units) if unit.name.endswith("mlp")]
        assert len(found) == 3


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * self.scale
        return x


def test_a_parameter_above_units_is_resident():
    units = divide(Rooted())
    assert [(unit.name, unit.keep_whole) for unit in units] == [("scale", True), ("blocks.0", False), ("blocks.1", False)]
    assert divide(Rooted(), resident=["blocks.1.bias"])[1].names == ["blocks.1.bias"]
    with pytest.raises(Error, match="no parameter is called 'nothing'"):
        divide(Rooted(), resident=["nothing"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_parameters_that_are_no_floating_point_numbers_are_refused_by_name(dtype):
    model = nn.Linear(2, 2)
    model.index = nn.Parameter(torch.zeros(2).to(dtype), requires_grad=False)
    with pytest.raises(Error, match=f"'index' is {dtype}") as caught:
        divide(model)
    assert caught.value.code == "UNIMPLEMENTED"


def order_of(model, example):
    units = divide(model)
    return observe(model, units, example, CPU, Fakes()), units


def test_the_order_of_a_tied_model():
    order, units = order_of(gpt2(), token_batches(1, 1)[0][0])
    assert [(visit.unit, visit.gradients) for visit in order.visits] == [(0, True), (1, True), (2, True), (3, True), (0, False)]
    assert order.events == [] and order.taking_visits(4) == [0, 0, 0, 0]
    assert [visit.unit for visit in of_registration(gpt2(), units).visits] == [0, 1, 2, 3]


class Backwards(nn.Module):
    """Registered in another order than it is called, one block twice, one never."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        for i in (2, 0, 1, 0):
            x = torch.relu(self.blocks[i](x))
        return x.sum()


def test_the_order_is_that_of_calls():
    order, _ = order_of(Backwards(), torch.zeros(2, 4))
    assert [visit.unit for visit in order.visits] == [2, 3, 0, 1, 0]  # 3 is never called, and registered behind 2
    assert order.taking_visits(4)[0] == 0


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=False).sum()


def test_a_checkpoint_over_two_units_is_seen():
    order, _ = order_of(Twice(), torch.zeros(2, 4))
    recompute = [event for event in order.events if event[1] == 2]
    assert [event[2] for event in recompute if event[0]] == [0]


def test_the_model_is_as_before():
    model = llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    observe(model, divide(model), token_batches(1, 1)[0][0], CPU, Fakes())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Unchangeable(dict):
    """As the configuration of a model of diffusers."""

    def update(self, *_):
        raise AssertionError("changed")


def test_a_configuration_that_cannot_be_changed_stays():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.settings, model.calls = Unchangeable(width=4), []
    model[0].forward = lambda x: (model.calls.append(x), nn.Linear.forward(model[0], x))[1]
    observe(model, divide(model), torch.zeros(2, 4), CPU, Fakes())
    assert model.settings == {"width": 4} and model.calls == []


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        return (self.blocks[1](self.blocks[0](x)) + self.blocks[0].bias).sum()


def test_what_is_used_outside_of_its_module_is_seen():
    order, _ = order_of(Outside(), torch.zeros(2, 4))
    assert order.outside == ["blocks.0.bias"]
