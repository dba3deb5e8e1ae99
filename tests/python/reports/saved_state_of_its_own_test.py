"""The user saved a model whose modules give more to state_dict() than parameters and buffers, or give it under other names."""

import io

import bitsandbytes
import pytest
import safetensors.torch
import torch
from ranks import on_one, on_ranks, on_two
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import config, gpt2, offloaded, squared_error, vector_batches, warned

import ebb


class Counted(nn.Module):
    """Has an extra state, as Transformer Engine's modules: bytes, a tensor or a dict."""

    def __init__(self, seed, kind=dict):
        super().__init__()
        self.linear, self.count, self.kind = nn.Linear(8, 8), 10 + seed, kind

    def forward(self, x):
        return self.linear(x)

    def get_extra_state(self):
        if self.kind is io.BytesIO:
            return io.BytesIO(bytes([self.count]))
        return torch.tensor([self.count]) if self.kind is torch.Tensor else {"count": self.count}

    def set_extra_state(self, state):
        self.count = state.getvalue()[0] if self.kind is io.BytesIO else int(state["count"] if self.kind is dict else state)


class Transposed(nn.Linear):
    """Saves another value than its parameter, and reads it back."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "kernel"] = self.weight.t().contiguous()
        destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, given, prefix, metadata, strict, missing, unexpected, errors):
        with torch.no_grad():
            self.weight.copy_(given[prefix + "kernel"].t())
            self.bias.copy_(given[prefix + "bias"])


class Hooked(nn.Linear):
    """Hooks of torch rename an entry, on the way out and in."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self._register_state_dict_hook(lambda module, values, prefix, _: self._rename(values, f"{prefix}weight", f"{prefix}kernel"))
        self._register_load_state_dict_pre_hook(lambda values, prefix, *_: self._rename(values, f"{prefix}kernel", f"{prefix}weight"))

    @staticmethod
    def _rename(values, old, new):
        if old in values:
            values[new] = values.pop(old)


def four_bits(seed):
    packed = bitsandbytes.nn.Linear4bit(8, 64, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=True)
    return packed.to("cpu")  # packs the weight


def make(seed=1, kind=dict):
    torch.manual_seed(seed)
    return nn.Sequential(
        checkpoint_wrapper(nn.Linear(8, 8)), Counted(seed, kind), Transposed(8, 8), Hooked(8, 8), checkpoint_wrapper(nn.BatchNorm1d(8)),
        four_bits(seed), nn.Linear(64, 1),
    )


def settings(folder):
    return config(zero=offloaded(folder) if ebb.world().size > 1 else {})


def assert_same(values, expected):
    assert list(values) == list(expected)
    for key, value in expected.items():
        other = values[key]
        if isinstance(value, torch.Tensor):
            assert other.dtype == value.dtype and torch.equal(other, value), key
        else:
            assert other == value or other.getvalue() == value.getvalue(), key


of_kinds = pytest.mark.parametrize(
    "ranks, kind", [("one", dict), ("one", torch.Tensor), ("one", io.BytesIO), ("two", dict)], indirect=["ranks"]  # two from the disk
)


@of_kinds
@on_ranks
def test_state_dict_is_torchs(folder, kind):
    plain = make(kind=kind)
    expected = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in plain.state_dict().items()}
    engine = ebb.initialize(model := make(kind=kind), settings(folder))
    assert_same(engine.state_dict(), expected)
    assert_same(model.state_dict(), expected)
    assert_same(model.state_dict(keep_vars=True), expected)
    assert (engine.state_dict(rank=0) == {}) == (engine.world.rank != 0)
    assert torch.equal(engine.gather("0.bias"), expected["0.bias"])
    assert model.load_state_dict(model.state_dict()) == ([], [])
    assert_same(engine.state_dict(), expected)
    others = make(2, kind).state_dict()  # other parameters, buffers, extra and 4-bit states
    model.load_state_dict(others)
    assert_same(engine.state_dict(), others)
    batch = vector_batches(1, 1)[0][0]
    plain.load_state_dict({key: value for key, value in others.items() if not key.startswith("5.weight")}, strict=False)
    plain[5] = make(2, kind)[5]
    assert torch.equal(squared_error(model, batch), squared_error(plain, batch))
    engine.drop()
    assert_same(model[1].state_dict(), make(2, kind)[1].state_dict())
    model[3].load_state_dict(make(1, kind)[3].state_dict())  # a part of the model
    assert torch.equal(engine.state_dict()["3.kernel"], expected["3.kernel"])
    values = model.state_dict()
    engine.close(keep_values=True)
    assert_same(model.state_dict(), values)


@of_kinds
@on_ranks
def test_a_checkpoint_has_it(folder, kind):
    engine = ebb.initialize(model := make(kind=kind), settings(folder + "/first"))
    engine.backward(squared_error(model, vector_batches(1, 2)[0][engine.world.rank]))
    engine.step()
    model[1].count = 77
    expected = engine.state_dict()
    engine.save(folder)
    engine.close()
    engine = ebb.initialize(model := make(2, kind), settings(folder + "/second"))
    engine.load(folder)
    assert_same(engine.state_dict(), expected)
    assert model[1].count == 77
    engine.close()


@on_one
def test_an_old_checkpoint_has_buffers_by_the_paths_of_modules():
    engine = ebb.initialize(make(), config())
    stream = io.BytesIO()
    torch.save({"4._checkpoint_wrapped_module.running_mean": torch.arange(8.0)}, stream)
    ebb._buffers.set_to(engine._entries, stream.getvalue())
    assert torch.equal(engine.state_dict()["4.running_mean"], torch.arange(8.0))
    engine.close()


@pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)
@on_ranks
def test_files_have_it_and_are_read(folder):
    engine = ebb.initialize(make(kind=torch.Tensor), settings(folder + "/swap"))
    engine.save_pretrained(folder, file_bytes=500, dtype=torch.bfloat16)
    engine.save_pretrained(folder)
    expected = engine.state_dict()
    if engine.world.rank == 0:
        saved = safetensors.torch.load_file(folder + "/model.safetensors")
        assert_same({key: saved[key] for key in sorted(saved)}, {key: expected[key] for key in sorted(expected)})
    engine.close()
    with ebb.empty_parameters():
        wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)), Counted(5, torch.Tensor))
    engine = ebb.initialize(wrapped, settings(folder + "/swap"), weights=folder + "/model.safetensors")
    values = engine.state_dict()
    assert_same(values, {key: expected[key] for key in values})
    assert wrapped[1].count == 11
    engine.close()
    engine = ebb.initialize(make(kind=dict), config())
    with pytest.raises(ebb.Error, match="'1._extra_state' is a dict, and safetensors files hold tensors alone"):
        engine.save_pretrained(folder)
    engine.close()


@on_two
def test_transformers_reads_wrapped_blocks(folder):
    model = gpt2()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for i, block in enumerate(model.transformer.h):
        model.transformer.h[i] = checkpoint_wrapper(block)
    engine = ebb.initialize(model, settings(folder + "/swap"))
    engine.save_pretrained(folder)
    engine.close()
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same(loaded.state_dict(), expected)


@on_two
def test_hooks_that_compute_values(folder):
    """A hook of the whole model gives new values."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def halve(module, values, prefix, _):
        for key in list(values):
            values["half." + key] = values.pop(key).detach() / 2

    model._register_state_dict_hook(halve)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    engine = ebb.initialize(model, settings(folder + "/swap"), values_of_rank_0=True)
    values = engine.state_dict()
    engine.save_pretrained(folder)
    if engine.world.rank == 0:
        assert_same(values, expected)
        assert_same(dict(sorted(safetensors.torch.load_file(folder + "/model.safetensors").items())), dict(sorted(expected.items())))
    engine.close()


class Turned(nn.Linear):
    """Saves a view of its square weight under the weight's name."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].t()


@on_two
def test_a_view_is_not_taken_for_its_parameter(folder):
    model = nn.Sequential(Turned(8, 8), nn.Linear(8, 1))
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    engine = ebb.initialize(model, settings(folder + "/swap"), values_of_rank_0=True)
    values = engine.state_dict()
    engine.save_pretrained(folder)
    if engine.world.rank == 0:
        assert_same(values, expected)
        assert_same(safetensors.torch.load_file(folder + "/model.safetensors"), expected)
    engine.close()


@on_one
def test_names_are_asked_for_without_values():
    """Names alone cost no gathering, unless a module's own code computes with its parameters."""
    engine = ebb.initialize(make(), config())
    asked = []
    gather = engine._state.gather
    engine._state.gather = lambda name, *rest, **more: asked.append(name) or gather(name, *rest, **more)
    engine._entries.of_names()
    assert asked == ["2.weight", "2.bias"]
    engine.close()


class Unsafe:
    pass


@on_one
def test_an_extra_state_that_no_checkpoint_can_have_is_named(folder):
    engine = ebb.initialize(make(), config())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counted, "get_extra_state", lambda self: Unsafe())
        said = warned(lambda: engine.save(folder))
    assert said == ["the checkpoint is saved without extra states that torch.load(weights_only=True) does not read: 1._extra_state"]
    engine.close()
