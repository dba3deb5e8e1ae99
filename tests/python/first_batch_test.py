"""The first batch shows the order of visits and leaves nothing else; what initialize refuses leaves the model as it was."""

import pytest
import torch
import training
from pitfalls_test import Blocks, refused
from ranks import on_one, on_two
from torch import nn
from training import compare, config, mlp, squared_error, vector_batches

import ebb

X, Y = vector_batches(1, 1)[0][0]


class Caches(Blocks):
    """Its blocks make tensors in their first forward, and keep them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.mask = None
            self.by_size = {}

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.ones(8)
                self.register_buffer("scale", torch.ones(8), persistent=False)
                self.register_buffer("offset", torch.zeros(8))
                self.by_size[len(x)] = torch.ones(8)
            return torch.tanh(self.linear(x)) * self.mask * self.scale * self.by_size[len(x)] + self.offset

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])


def train(model, engine):
    engine.backward(squared_error(model, (X, Y)))
    assert engine.step()
    return engine.report().loss


class OwnScale(nn.Module):
    """No block of modules in it, so that its own parameter is in a unit and the first batch comes to it within its hooks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return self.head(x) * self.scale


@on_two
def test_the_first_batch_within_hooks_of_a_unit():
    model, plain = OwnScale(), OwnScale()
    engine = ebb.initialize(model, config(optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_clipping=0))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        loss = squared_error(plain, (X, Y))
        assert abs(train(model, engine) - loss.item()) < 1e-6
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in plain.named_parameters():
        assert torch.allclose(engine.gather(name), value, atol=2e-6), name
    engine.close()


@on_one
def test_what_a_forward_keeps_is_real():
    model, plain = Caches(), Caches()
    plain.load_state_dict(model.state_dict())
    seen = []
    model.blocks[0].register_forward_hook(lambda module, arguments, output: seen.append(type(output)))
    engine = ebb.initialize(model, config())
    loss = train(model, engine)
    assert seen == [torch.Tensor]
    assert abs(loss - squared_error(plain, (X, Y)).item()) < 1e-6
    block = model.blocks[0]
    assert all(type(one) is torch.Tensor for one in (block.mask, block.scale, block.offset, block.by_size[2]))
    assert block._non_persistent_buffers_set == {"scale"}
    engine.close()


class HidesACache(Blocks):
    class Holder:
        __slots__ = ("mask",)

    def __init__(self):
        super().__init__()
        self.holder = self.Holder()

    def forward(self, x):
        if not hasattr(self.holder, "mask"):
            self.holder.mask = x.new_ones(8)  # of sizes alone it would be real
        return super().forward(x * self.holder.mask)


@on_one
def test_a_cache_that_cannot_be_taken_back_is_named():
    model = nn.Sequential(HidesACache(), nn.Linear(1, 1))
    engine = ebb.initialize(model, config())
    refused(lambda: model(X), "'mask' of an object of HidesACache.Holder keeps a tensor without values")
    engine.close()


class TwoBranches(Blocks):
    def forward(self, x):
        first = getattr(self, "first", 0)
        x = torch.tanh(self.blocks[first](x))
        x = torch.tanh(self.blocks[1 - first](x))
        return self.head(torch.tanh(self.blocks[2](x)))


@on_two
def test_ranks_whose_first_batches_show_other_orders_get_an_error():
    model = TwoBranches()
    engine = ebb.initialize(model, config())
    model.first = engine.world.rank
    with pytest.raises(ebb.Error, match="order|visit") as caught:
        train(model, engine)
    assert "rank" in str(caught.value)
    engine.close()


@on_one
def test_a_module_has_one_engine():
    model = Blocks()
    engine = ebb.initialize(model, config())
    refused(lambda: ebb.initialize(model, config()), "has an engine", "ALREADY_EXISTS")
    refused(lambda: ebb.initialize(model.head, config()), "another engine has parameter 'weight' already, as 'head.weight'", "ALREADY_EXISTS")
    refused(lambda: ebb.initialize(nn.Sequential(nn.Linear(8, 8), model.blocks[1]), config()), "'1.weight'", "ALREADY_EXISTS")
    train(model, engine)
    engine.close(keep_values=True)
    ebb.initialize(model.head, config()).close()


@on_one
def test_what_is_refused_is_left_as_it_was(folder):
    import safetensors.torch

    safetensors.torch.save_file(mlp().state_dict(), folder + "/model.safetensors")
    with torch.device("meta"):
        model = mlp()
        model.register_buffer("extra", torch.ones(2))
    before = dict(model.named_parameters())
    refused(lambda: ebb.initialize(model, config(), weights=folder), "buffer 'extra' is on the meta device")
    for name, parameter in model.named_parameters():
        assert parameter is before[name] and parameter.is_meta


class DependsOnValues(Blocks):
    """Fake tensors cannot show its order, which is not that of registration."""

    def __init__(self, order=(2, 0, 1)):
        super().__init__()
        self.order = order

    def forward(self, x):
        for i in self.order if x.sum().item() > -1e9 else ():
            x = torch.tanh(self.blocks[i](x))
        return self.head(x)


@pytest.mark.parametrize("order", [(2, 0, 1), (0, 1, 0, 2), (2, 1)])
@on_two
def test_an_order_that_depends_on_values_is_that_of_an_evaluation(order):
    compare(lambda: DependsOnValues(order), vector_batches(3, 2), squared_error, optimizer=training.SGD, settings=config(optimizer=training.SGD))


class ReadsFirst(Blocks):
    """A parameter that is used outside of its module is read before any unit runs."""

    def forward(self, x):
        return super().forward(x * self.head.weight)


@on_two
def test_a_resident_parameter_that_is_read_first_has_the_value_of_the_step_before():
    batches = vector_batches(4, 2)
    compare(ReadsFirst, batches, squared_error, example=(batches[0][0][0],))


def _regularized(model, batch):
    return squared_error(model, batch) + 0.01 * sum(parameter.abs().sum() for parameter in model.parameters())


@on_two
def test_a_loss_that_reads_parameters():
    """An error names one. With the loss as an example they are resident, all of them, and learn as in torch."""
    batches = vector_batches(4, 2)
    model = Blocks()
    engine = ebb.initialize(model, config())
    refused(lambda: engine.backward(_regularized(model, batches[0][0])), r"'blocks.0.weight' is read by abs outside of its unit, at .*first_batch_test.py")
    engine.drop()
    assert train(model, engine)
    engine.close()
    compare(Blocks, batches, _regularized, example=lambda model: _regularized(model, batches[0][0]))


@on_one
def test_a_lazy_module_is_named():
    refused(lambda: ebb.initialize(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1)), config()), "'0.weight' of a lazy module has no shape yet")


class LengthOnly(nn.Module):
    """Asks for a value, so that fake tensors cannot run it, and has two resident parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.scale, self.offset = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks[: 2 if x.sum().item() < 1e9 else 1]:
            x = torch.tanh(block(x)) * self.scale + self.offset
        return self.head(x)


@on_two
def test_two_resident_parameters_of_a_model_that_fake_tensors_cannot_run():
    compare(LengthOnly, vector_batches(3, 2), squared_error)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("frozen", ["blocks.0", "blocks", "head"])
@on_two
def test_what_is_frozen_for_the_first_steps_is_trained_later(frozen, stage):
    model, plain = Blocks(), Blocks()
    engine = ebb.initialize(model, config(stage, optimizer=training.SGD, gradient_clipping=0.0))
    optimizer = torch.optim.SGD(plain.parameters(), **training.SGD["params"])
    for trains in (False, True):
        for one in (model, plain):
            one.get_submodule(frozen).requires_grad_(trains)
        for of_step in vector_batches(2, 2):
            engine.backward(squared_error(model, of_step[engine.world.rank]))
            assert engine.step()
            sum(squared_error(plain, batch) / 2 for batch in of_step).backward()
            optimizer.step(), optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.allclose(engine.gather(name), value, atol=2e-6), name
    engine.close()


@on_two
def test_what_was_frozen_at_initialize_cannot_be_unfrozen():
    model = Blocks()
    model.blocks[0].requires_grad_(False)
    engine = ebb.initialize(model, config())
    train(model, engine)
    model.blocks[0].requires_grad_(True)
    refused(lambda: train(model, engine), "'blocks.0.weight' has a gradient, but was frozen at ebb.initialize.*after ebb.initialize")
    engine.drop()
    model.blocks[0].requires_grad_(False)
    train(model, engine)
    engine.close()


class OffAtFirst(Blocks):
    """A block that early steps do not run."""

    runs = False

    def forward(self, x):
        x = torch.tanh(self.blocks[0](x))
        if self.runs:
            x = torch.tanh(self.blocks[1](x))
        return self.head(torch.tanh(self.blocks[2](x)))


@on_two
def test_a_block_that_the_first_batch_leaves_out_comes_in_its_place_later():
    def loss_of(model, batch):
        model.runs = batch is batches[1][0] or batch is batches[1][1]
        return squared_error(model, batch)

    batches = vector_batches(3, 2)
    compare(OffAtFirst, batches, loss_of, optimizer=training.SGD)
