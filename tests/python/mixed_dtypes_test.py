"""Parameters of several types in one model: routers and norms in fp32 beside bf16, a frozen base of bytes."""

import copy

import pytest
import torch
from ranks import on_one, on_two
from torch import nn
from training import SGD, config, digest, offloaded

import ebb


class Quantised(nn.Module):
    """Two numbers of 4 bits in each byte, as bitsandbytes keeps them; LoRA beside them."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.width, self.dtype = width, dtype
        self.register_buffer("table", torch.linspace(-0.1, 0.1, 16), persistent=False)
        self.base = nn.Parameter(torch.randint(0, 256, (width * width // 2, 1), dtype=torch.uint8), requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, width, dtype=dtype) * 0.3)
        self.up = nn.Parameter(torch.randn(width, 2, dtype=dtype) * 0.3)

    def forward(self, x):
        weight = self.table[torch.cat([self.base >> 4, self.base & 15], 1).long()].view(self.width, self.width).to(self.dtype)
        return x @ weight.T + (x @ self.down.T) @ self.up.T


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.norm = nn.LayerNorm(width)  # fp32
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(width, width).to(dtype)) for _ in range(2)])
        self.base = Quantised(width, dtype)

    def forward(self, x):
        y = self.norm(x.float())
        gates = self.router(y).softmax(-1)
        y = y.to(x.dtype)
        mixed = sum(gates[:, i : i + 1].to(x.dtype) * expert(y) for i, expert in enumerate(self.experts))
        return x + torch.tanh(mixed + self.base(y))


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, width: int = 16):
        super().__init__()
        torch.manual_seed(3)
        self.dtype = dtype
        self.embed = nn.Linear(8, width).to(dtype)
        self.blocks = nn.ModuleList([Block(width, dtype) for _ in range(3)])
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.embed(x.to(self.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(x.float())


def batch(step: int, rank: int = 0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=generator), torch.randn(6, 4, generator=generator)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def settings(dtype=torch.bfloat16, **more):
    return config(optimizer=SGD, gradient_clipping=0.0, **{"bf16": {"enabled": dtype == torch.bfloat16}, **more})


def rounded(master):
    """As the engine makes bf16 of a master: half away from zero."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_one
def test_the_bits_are_those_of_plain_torch(dtype):
    model = Model(dtype)
    plain = copy.deepcopy(model)
    engine = ebb.initialize(model, settings(dtype))
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float() for parameter in trained]
    for step in range(6):
        x, y = batch(step)
        loss = loss_of(model, x, y)
        engine.backward(loss)
        engine.step()
        expected = loss_of(plain, x, y)
        expected.backward()
        assert loss.item() == expected.item(), step
        with torch.no_grad():
            for parameter, master in zip(trained, masters):
                assert parameter.grad.dtype == parameter.dtype
                master.add_(parameter.grad.float(), alpha=-SGD["params"]["lr"])
                parameter.copy_(rounded(master) if parameter.dtype == torch.bfloat16 else master)
                parameter.grad = None
    of = dict(zip(map(id, trained), masters))
    for name, parameter in plain.named_parameters():
        value = engine.gather(name)
        assert value.dtype == parameter.dtype, name
        if parameter.requires_grad:
            assert torch.equal(engine.gather(name, master=True), of[id(parameter)]), name
        else:
            assert torch.equal(value, parameter), name
    engine.close()


def _trained(stage, folder, offload):
    zero = offloaded(folder) if offload else {}
    model = Model()
    given = settings(zero=dict(zero, stage=stage))
    predicted = {(row.state, row.tier): row.predicted for row in ebb.predict_memory(model, given, 2, example=batch(0)[0])}
    engine = ebb.initialize(model, given, example=batch(0)[0])
    for step in range(4):
        engine.backward(loss_of(model, *batch(step, engine.world.rank)))
        engine.step()
        with torch.no_grad():
            model(batch(9)[0])
    for row in engine.memory():
        assert row.predicted == predicted[row.state, row.tier] == row.peak, row
    assert torch.equal(engine.gather("blocks.1.base.base"), Model().blocks[1].base.base)
    result = digest(engine)
    engine.close()
    return result


def test_one_digest_over_stages_and_tiers(two, tmp_path):
    digests = {two.run(_trained, stage, str(tmp_path), offload)[0] for stage, offload in [(0, False), (1, False), (2, True), (3, False), (3, True)]}
    assert len(digests) == 1


@on_two
def test_state_comes_back_in_its_types(folder):
    engine = ebb.initialize(Model(), settings())
    model = engine.model
    engine.backward(loss_of(model, *batch(0, engine.world.rank)))
    engine.step()
    values = engine.state_dict()
    engine.save(folder + "/run")
    engine.save_pretrained(folder + "/model")
    engine.write("blocks.0.base.base", torch.zeros_like(values["blocks.0.base.base"]))
    assert not engine.gather("blocks.0.base.base").any()
    engine.load_state_dict(values)
    engine.close()
    torch.manual_seed(8)
    other = ebb.initialize(Model(), settings(zero={"stage": 1}))
    other.load(folder + "/run")
    for name, value in other.state_dict().items():
        assert torch.equal(value, values[name]) and value.dtype == values[name].dtype, name
    other.close()
    with ebb.empty_parameters():
        empty = Model()
    third = ebb.initialize(empty, settings(), weights=folder + "/model")
    for name, value in third.state_dict().items():
        assert torch.equal(value, values[name]), name
    third.close()


@pytest.mark.parametrize("kind, dtype, expected", [
    ("bf16", torch.bfloat16, {"torch.bfloat16", "torch.float32"}),
    (None, torch.bfloat16, {"torch.bfloat16", "torch.float32"}),
    ("fp16", torch.bfloat16, {"torch.float16"}),
    ("bf16", torch.float32, {"torch.bfloat16"}),
])
@on_one
def test_a_model_keeps_its_types_where_the_configured_one_is_among_them(kind, dtype, expected):
    engine = ebb.initialize(Model(dtype), config(optimizer=SGD, **({kind: {"enabled": True}} if kind else {})))
    found = {view.dtype for slots in engine._slots for view in slots.views} - {torch.uint8}
    engine.close()
    assert {str(dtype) for dtype in found} == expected


class Scaled(nn.Module):
    """One parameter in fp16, among others in `dtype`."""

    def __init__(self, dtype: torch.dtype, trains: bool):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(8, 8, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float16), requires_grad=trains)
        self.head = nn.Linear(8, 4, dtype=dtype)

    def forward(self, x):
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.head(x * self.scale.to(x.dtype)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_one
def test_a_frozen_parameter_in_fp16_needs_no_scaled_loss(dtype):
    model = Scaled(dtype, trains=False)
    plain = copy.deepcopy(model)
    engine = ebb.initialize(model, settings(dtype))
    loss = loss_of(model, *batch(0))
    loss.backward()
    assert engine.step()
    loss_of(plain, *batch(0)).backward()
    for name, parameter in plain.named_parameters():
        value = engine.gather(name, master=True)
        before = parameter.detach().float()
        expected = before if parameter.grad is None else before - SGD["params"]["lr"] * parameter.grad.float()
        assert engine.gather(name).dtype == parameter.dtype and torch.allclose(value, expected, atol=1e-6), name
    assert engine.report().loss_scale == 1
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_one
def test_a_trained_parameter_in_fp16_without_the_fp16_of_the_json_is_refused(dtype):
    with pytest.raises(ebb.Error, match="parameter 'scale' is fp16 .* has no loss scale"):
        ebb.initialize(Scaled(dtype, trains=True), settings(dtype))
