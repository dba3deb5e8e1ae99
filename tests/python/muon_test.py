"""Muon of the JSON beside torch.optim.Muon, and beside the same rule in fp64."""

import copy

import pytest
import torch
from ranks import on_one
from torch import nn
from training import config, squared_error

import ebb

STEPS, RATE, ADAM_RATE, DECAY = 20, 0.02, 3e-3, 0.1


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 16))


def batches():
    torch.manual_seed(4)
    return [(torch.randn(8, 48), torch.randn(8, 16)) for _ in range(STEPS)]


def settings(**more):
    params = {"lr": RATE, "adam_lr": ADAM_RATE, "weight_decay": DECAY, "betas": [0.9, 0.95], "eps": 1e-10, **more}
    return config(optimizer={"type": "Muon", "params": params}, gradient_clipping=0)


def with_ebb(plain, **more):
    trained = copy.deepcopy(plain)
    engine = ebb.initialize(trained, settings(**more))
    for batch in batches():
        engine.backward(squared_error(trained, batch))
        engine.step()
    values = {name: engine.gather(name).double() for name, _ in plain.named_parameters()}
    engine.close()
    return values


def apart(ours, theirs):
    """Of all values together, relative."""
    difference = sum(((ours[name] - value.double()) ** 2).sum() for name, value in theirs.items())
    return (difference / sum((value.double() ** 2).sum() for value in theirs.values())).sqrt().item()


# Each is as far from the same rule in fp32 as the other.
@on_one
@pytest.mark.parametrize("shape, rate", [("original", 0.01), ("match_rms_adamw", 0.005)])
def test_bf16_is_near_torchs(shape, rate):
    plain = model()
    ours = with_ebb(plain, lr=rate, adjust_lr_fn=shape)
    exact = with_ebb(plain, lr=rate, adjust_lr_fn=shape, ns_dtype="fp32")
    matrices = [parameter for parameter in plain.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in plain.parameters() if parameter.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=DECAY, adjust_lr_fn=shape)
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-10)
    for batch in batches():
        squared_error(plain, batch).backward()
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    theirs = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert apart(ours, theirs) < 1e-2
    assert apart(ours, exact) < 1.25 * apart(theirs, exact)


def orthogonal(x):
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


@on_one
def test_fp32_is_near_the_same_rule_in_fp64():
    plain = model()
    ours = with_ebb(plain, ns_dtype="fp32")
    plain.double()
    momenta = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters() if parameter.dim() == 2}
    adam = torch.optim.AdamW([p for p in plain.parameters() if p.dim() != 2], lr=ADAM_RATE, weight_decay=DECAY, betas=(0.9, 0.95), eps=1e-10)
    for x, y in batches():
        plain.zero_grad()
        squared_error(plain, (x.double(), y.double())).backward()
        adam.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if name not in momenta:
                    continue
                momenta[name].lerp_(parameter.grad, 0.05)
                update = orthogonal(parameter.grad.lerp(momenta[name], 0.95)) * max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.mul_(1 - RATE * DECAY).sub_(update, alpha=RATE)
    assert apart(ours, dict(plain.named_parameters())) < 1e-5


def _state(engine):
    names = [name for name, _ in model().named_parameters()]
    momenta = {name: engine.gather(name, state="momentum_buffer") for name in names if name.endswith("weight")}
    return {name: engine.gather(name) for name in names}, momenta


def _saved(folder):
    trained = model()
    engine = ebb.initialize(trained, settings())
    for batch in batches()[:3]:
        engine.backward(squared_error(trained, batch))
        engine.step()
    engine.save(folder)
    state = _state(engine)
    engine.close()
    return state


def _loaded(folder):
    trained = model()
    engine = ebb.initialize(trained, settings())
    engine.load(folder)
    state = _state(engine)
    engine.backward(squared_error(trained, batches()[3]))
    engine.step()
    engine.close()
    return state


def test_another_world_goes_on(one, two, tmp_path):
    (saved,) = one.run(_saved, str(tmp_path))
    for loaded in two.run(_loaded, str(tmp_path)):
        for ours, theirs in zip(loaded, saved):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(30, 8), nn.Embedding(4, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.other, self.scores = nn.Linear(8, 8), nn.Linear(8, 30)

    def forward(self, x):
        x = self.words(x) + self.places.weight
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.scores(self.other(x))


def _matrices_of_muon(trained, **more):
    """AdamW has two states, so the state of Muon tells whose a parameter is."""
    engine = ebb.initialize(trained, settings(), **more)
    of_muon = set()
    for name, parameter in trained.named_parameters():
        if parameter.dim() == 2:
            try:
                engine.gather(name, state="momentum_buffer")
                of_muon.add(name)
            except ebb.Error:
                engine.gather(name, state="exp_avg_sq")
    engine.close()
    return of_muon


@on_one
def test_torchs_embeddings_are_no_hidden_layers():
    assert _matrices_of_muon(Tokens()) == {"layers.0.weight", "layers.1.weight", "other.weight"}


@on_one
def test_the_attribute_use_muon_decides_as_in_deepspeed():
    trained = Tokens()
    trained.words.weight.use_muon = True
    trained.other.weight.use_muon = False
    assert _matrices_of_muon(trained) == {"words.weight", "layers.0.weight", "layers.1.weight"}
    trained = Tokens()
    trained.words.weight.use_muon = "no"
    with pytest.raises(ebb.Error, match="use_muon='no': give True or False"):
        _matrices_of_muon(trained)


@on_one
def test_the_output_layer_of_transformers_is_no_hidden_layer():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
    trained = transformers.BertForMaskedLM(transformers.BertConfig(**small, tie_word_embeddings=False))
    of_muon = _matrices_of_muon(trained, example={"input_ids": torch.zeros(1, 4, dtype=torch.long)})
    assert "bert.encoder.layer.0.output.dense.weight" in of_muon
    assert "cls.predictions.decoder.weight" not in of_muon
