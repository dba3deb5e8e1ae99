"""Files of models: what a killed or failed writer leaves, and what readers say about files of other programs."""

import os

import pytest
import safetensors.torch
import torch
from ranks import on_one
from torch import nn
from training import config, gpt2, mlp, warned

import ebb


class Killed(BaseException):
    """Raised in place of a call to the system. Unlike an Exception, it ends save_pretrained at once."""


def _changes(monkeypatch, fails_at):
    """The calls that change names, counted. Call `fails_at` raises."""
    made = []
    for name in ("replace", "link", "unlink"):
        def call(*arguments, real=getattr(os, name), **keywords):
            made.append(arguments)
            if len(made) == fails_at:
                raise Killed
            return real(*arguments, **keywords)

        monkeypatch.setattr(os, name, call)
    return made


@pytest.mark.parametrize("before, after", [(60_000, 60_000), (60_000, 10**9), (10**9, 60_000)])
@on_one
def test_a_killed_save_pretrained_leaves_the_earlier_model_or_the_new_one(folder, before, after):
    engine = ebb.initialize(model := gpt2(), config())
    values = engine.state_dict()
    later = {key: value + 1 for key, value in values.items()}
    made, calls = [()], 0
    while len(made) >= calls:  # the last save is not killed
        calls += 1
        place = f"{folder}/{calls}"
        engine.load_state_dict(values)
        engine.save_pretrained(place, file_bytes=before)
        engine.load_state_dict(later)
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = _changes(monkeypatch, calls)
            try:
                engine.save_pretrained(place, file_bytes=after)
            except Killed:
                pass
        for read in (type(model).from_pretrained(place).state_dict(), _with_ebb(place, model.config)):
            assert any(all(torch.equal(read[key], whole[key]) for key in whole) for whole in (values, later)), (calls, made[-1])
        assert len(made) >= calls or torch.equal(read["lm_head.weight"], later["lm_head.weight"])
        engine.save_pretrained(place, file_bytes=after)
        left = [name for name in os.listdir(place) if name.startswith(".") or "earlier" in name]
        assert not left, left
    engine.close()


def _with_ebb(folder, described):
    import transformers

    with ebb.empty_parameters():
        model = transformers.GPT2LMHeadModel(described)
    with ebb.initialize(model, config(), weights=folder) as engine:
        return engine.state_dict()


@on_one
def test_a_failed_save_pretrained_leaves_no_unfinished_file(folder):
    engine = ebb.initialize(mlp(), config())
    engine.save_pretrained(folder)
    expected = engine.state_dict()
    files = sorted(os.listdir(folder))
    with pytest.MonkeyPatch.context() as monkeypatch:
        def fsync(file):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(ebb.Error, match="No space left"):
            engine.save_pretrained(folder)
    assert sorted(os.listdir(folder)) == files
    with pytest.raises(ebb.Error, match="dtype=torch.int8 would cut the values"):
        engine.save_pretrained(folder, dtype=torch.int8)
    loaded = safetensors.torch.load_file(f"{folder}/model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    engine.close()


def _buffers_of_a_run(folder):
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.manual_seed(1)
    engine = ebb.initialize(model := make(), config())
    engine.backward(model(torch.full((2, 4), 1.0 + engine.world.rank)).square().mean())
    engine.step()
    expected = {key: value.clone() for key, value in model[1].named_buffers()}
    assert expected["num_batches_tracked"] == 1
    engine.save(folder, trainer=b"place", of_this_rank=b"own")
    engine.close()
    torch.manual_seed(1)
    engine = ebb.initialize(model := make(), config())
    assert engine.load(folder) == (1, b"place", b"own")
    assert all(torch.equal(value, expected[key]) for key, value in model[1].named_buffers())
    engine.close()
    return expected


def _buffers_elsewhere(folder, of_rank_0):
    engine = ebb.initialize(model := nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), config())
    assert engine.load(folder) == (1, b"place", b"")
    assert all(torch.equal(value, of_rank_0[key]) for key, value in model[1].named_buffers())
    engine.close()


def test_a_checkpoint_has_the_buffers_of_each_rank(one, two, tmp_path):
    of_rank_0, _ = two.run(_buffers_of_a_run, str(tmp_path))
    one.run(_buffers_elsewhere, str(tmp_path), of_rank_0)


class Queue(nn.Module):
    def __init__(self, elements, kept=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("queue", torch.zeros(elements))
        self.register_buffer("later", kept)

    def forward(self, x):
        return self.last(self.first(x))


@on_one
def test_buffers_that_do_not_fit_are_named(folder):
    engine = ebb.initialize(model := Queue(2, torch.ones(3)), config())
    model.queue.fill_(7)
    assert warned(lambda: engine.save(f"{folder}/small")) == []
    engine.close()
    engine = ebb.initialize(model := Queue(3), config())
    assert warned(lambda: engine.load(f"{folder}/small")) == [
        "1 buffers keep their values, because the checkpoint lacks them or has another shape: queue",
        "1 buffers of the checkpoint are not in the model: later"]
    assert model.queue.sum() == 0
    engine.close()
    engine = ebb.initialize(Queue((4 << 20) + 1), config())
    (said,) = warned(lambda: engine.save(f"{folder}/large"))
    assert said.startswith("the checkpoint is saved without the model's buffers, because they have 16777220 bytes")
    assert len(warned(lambda: engine.load(f"{folder}/large"))) == 1
    engine.close()


@on_one
def test_files_of_other_programs_that_do_not_fit_are_named(folder):
    def refused(said, make=mlp):
        with ebb.empty_parameters():
            model = make()
        with pytest.raises(ebb.Error, match=said):
            ebb.initialize(model, config(), weights=folder)

    index = f"{folder}/model.safetensors.index.json"
    for text in ("", "{}", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        with open(index, "w") as file:
            file.write(text)
        refused("index.json' is not an index of a model's files")
    values = mlp().state_dict()
    name = next(iter(values))
    for dtype, shown in ((torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")):
        safetensors.torch.save_file(dict(values, **{name: values[name].to(dtype)}), f"{folder}/model.safetensors")
        refused(f"'{name}' of '{folder}' is {shown}, not F32, BF16 or F16")
    model = gpt2()
    tied = {key: value.clone() for key, value in model.state_dict().items()}
    safetensors.torch.save_file(tied, f"{folder}/model.safetensors")
    _with_ebb(folder, model.config)
    tied["lm_head.weight"][-1, -1] += 1
    safetensors.torch.save_file(tied, f"{folder}/model.safetensors")
    with pytest.raises(ebb.Error, match="'transformer.wte.weight' and 'lm_head.weight' are one parameter, and differ"):
        _with_ebb(folder, model.config)


@on_one
def test_a_buffer_of_another_shape_is_refused():
    engine = ebb.initialize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), config())
    with pytest.raises(ebb.Error, match=r"buffer '1.running_mean' has the shape \[4\], and was given \[1\]"):
        engine.load_state_dict(dict(engine.state_dict(), **{"1.running_mean": torch.ones(1)}))
    engine.close()
