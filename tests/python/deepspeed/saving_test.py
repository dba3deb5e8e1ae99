"""Checkpoints with tags, client state and a schedule."""

import os

import loops
import pytest
import torch
import training
from ranks import on_one, on_ranks

both = pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 9, "warmup_type": "linear"}}


def _begin(stage=3, **more):
    return loops.begin(training.mlp(), loops.config(stage, accumulate=2, scheduler=WARMUP, **more))


@both
@pytest.mark.parametrize("stage, then", [(0, 1), (3, 3), (3, 2)])
@on_ranks
def test_a_run_goes_on_bit_for_bit(stage, then, folder):
    engine = _begin(stage)
    batches = training.vector_batches(6, 2 * engine.world_size)
    loops.train(engine, batches[:3], 2)
    assert engine.save_checkpoint(folder, client_state={"epoch": 3, "numbers": torch.arange(3)}) is True
    expected = loops.train(engine, batches[3:], 2)
    masters = {name: engine.ebb.gather(name, master=True) for name in engine.module_state_dict()}
    engine.destroy()
    other = _begin(then)
    path, state = other.load_checkpoint(folder)
    assert path == os.path.join(folder, "global_step3") and state["epoch"] == 3 and torch.equal(state["numbers"], torch.arange(3))
    assert (other.global_steps, other.micro_steps, other.global_samples) == (3, 6, 12 * other.world_size)
    assert loops.train(other, batches[3:], 2) == expected
    assert all(torch.equal(other.ebb.gather(name, master=True), value) for name, value in masters.items())
    other.destroy()


def _save(folder):
    engine = _begin()
    loops.train(engine, training.vector_batches(2, 2 * engine.world_size), 2)
    engine.save_checkpoint(folder, "mine")
    values = {name: engine.ebb.gather(name, master=True) for name in engine.module_state_dict()}
    rates = engine.get_lr()
    engine.destroy()
    return values, rates


def _load(folder, values, rates):
    engine = _begin(2)
    assert engine.load_checkpoint(folder)[0] == os.path.join(folder, "mine")
    assert engine.get_lr() == rates and engine.lr_scheduler.last_batch_iteration == 1
    for name, value in values.items():
        assert torch.equal(engine.ebb.gather(name, master=True), value)
    loops.train(engine, training.vector_batches(1, 2 * engine.world_size), 2)
    engine.destroy()


def test_another_number_of_ranks_goes_on(one, two, tmp_path):
    values, rates = two.run(_save, str(tmp_path))[0]
    one.run(_load, str(tmp_path), values, rates)


@both
@on_ranks
def test_without_states_the_optimizer_begins_anew(folder):
    engine = _begin()
    batches = training.vector_batches(2, 2 * engine.world_size)
    loops.train(engine, batches, 2)
    engine.save_checkpoint(folder)
    values = engine.module_state_dict()
    engine.destroy()
    other = _begin()
    other.load_checkpoint(folder, load_optimizer_states=False, load_lr_scheduler_states=False)
    assert all(torch.equal(value, values[name]) for name, value in other.module_state_dict().items())
    assert other.get_lr() == [0.0] and other.global_steps == 2
    assert loops.deepspeed().utils.safe_get_full_optimizer_state(other.module[0].weight, "exp_avg").abs().max() == 0
    loops.train(other, batches, 2)
    other.destroy()


@on_one
def test_a_second_save_replaces_the_tag_and_latest_names_the_last(folder):
    engine = _begin()
    for number in range(2):
        loops.train(engine, training.vector_batches(1, 2), 2)
        engine.save_checkpoint(folder, tag="same", client_state={"number": number})
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    assert open(f"{folder}/latest").read() == "same" and engine.load_checkpoint(folder)[1] == {"number": 1}
    assert engine.load_checkpoint(folder, tag="other")[1] == {}
    assert engine.load_checkpoint(folder, load_module_strict=False)[1] == {"number": 1}
    engine.destroy()
    larger = torch.nn.Sequential(*training.mlp(), torch.nn.Linear(1, 1))
    engine = loops.begin(larger, loops.config(accumulate=2))
    with pytest.raises(RuntimeError):
        engine.load_checkpoint(folder, load_module_strict=False)
    engine.destroy()


@on_one
def test_what_is_not_there_is_none_and_a_folder_of_deepspeed_says_what_to_do(folder):
    import ebb

    engine = _begin()
    assert engine.load_checkpoint(folder) == (None, None) == engine.load_checkpoint(folder, tag="missing")
    os.makedirs(f"{folder}/theirs")
    open(f"{folder}/theirs/mp_rank_00_model_states.pt", "w").close()
    with pytest.raises(ebb.Error, match="is a checkpoint of DeepSpeed's.*ds_to_universal"):
        engine.load_checkpoint(folder, tag="theirs")
    engine.destroy()


@on_one
def test_a_model_without_an_engine_is_saved_too(folder):
    settings = loops.config(1)
    engine = loops.deepspeed().initialize(model=training.mlp(), config=settings)[0]
    with torch.no_grad():
        engine.module[0].weight.fill_(3)
    engine.save_checkpoint(folder)
    other = loops.deepspeed().initialize(model=training.mlp(), config=settings)[0]
    other.load_checkpoint(folder)
    assert other.module[0].weight.min() == 3
