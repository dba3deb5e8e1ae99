"""Checkpoints with tags, client state and a schedule."""

import json
import os
import subprocess
import sys

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
    assert (other.skipped_steps, other.was_step_applied(), other.get_global_grad_norm(), other.optimizer.overflow) == (0, False, None, False)
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
    with pytest.raises(RuntimeError, match="lacks the parameter '7.weight'"):
        engine.load_checkpoint(folder)
    scale = engine.ebb.gather("7.weight") * 1
    engine.load_checkpoint(folder, load_module_strict=False, load_optimizer_states=False)
    assert torch.equal(engine.ebb.gather("7.weight"), scale)  # what the folder lacks stays
    engine.destroy()


@on_one
def test_what_is_not_there_is_none_and_a_folder_of_deepspeed_says_what_to_do(folder):
    import ebb

    engine = _begin()
    assert engine.load_checkpoint(folder) == (None, None) == engine.load_checkpoint(folder, tag="missing")
    os.makedirs(f"{folder}/theirs")
    open(f"{folder}/theirs/mp_rank_00_model_states.pt", "w").close()
    with pytest.raises(ebb.Error, match="is a checkpoint of DeepSpeed's.*ds_to_universal --input_folder .*/theirs --output_folder .*/theirs_universal"):
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


@both
@on_ranks
def test_values_are_loaded_again_while_a_run_goes_on(folder):
    """Values of the folder, and states, counters and rates of the run."""
    engine = _begin()
    batches = training.vector_batches(3, 2 * engine.world_size)
    engine.save_checkpoint(folder, client_state={"epoch": 0})
    values = engine.module_state_dict()
    loops.train(engine, batches, 2)
    utils, weight = loops.deepspeed().utils, engine.module[0].weight
    state = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert engine.load_checkpoint(folder, load_module_only=True)[1] == {"epoch": 0}
    assert all(torch.equal(value, values[name]) for name, value in engine.module_state_dict().items())
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), state) and engine.global_steps == 3
    loops.train(engine, batches, 2)
    engine.destroy()


def _write_universal(folder, engine, is_flat, **client_state):
    """What DeepSpeed's ds_to_universal writes of such a run: of stage 3 (`is_flat`), and of the others. On rank 0."""
    gather = lambda name, state: engine.ebb.gather(name, master=True, state=state)
    names = [name for name, _ in engine.module.named_parameters()]
    states = {name: {file: gather(name, state) for file, state in _FILES.items()} for name in names}
    if engine.global_rank == 0:
        for name, files in states.items():
            os.makedirs(f"{folder}/zero/{name}")
            for file, value in files.items():
                torch.save(value.flatten() if is_flat else {"cat_dim": 0, "param": value}, f"{folder}/zero/{name}/{file}.pt")
            if not is_flat:
                torch.save(torch.tensor(float(engine.global_steps)), f"{folder}/zero/{name}/step.pt")
        groups = [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]
        inner = {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(float(engine.global_steps))}}}} if is_flat else {}
        torch.save({"param_groups": groups, **inner}, f"{folder}/zero/optimizer_state.pt")
        facts = {
            "module": {}, "param_shapes": [{name: one["fp32"].shape for name, one in states.items()}], "global_steps": engine.global_steps,
            "global_samples": engine.global_samples, "skipped_steps": 0, "lr_scheduler": engine.lr_scheduler.state_dict(), "ds_version": "0.19.8",
        }
        torch.save({**facts, **client_state}, f"{folder}/{'zero_pp_rank_0_' if is_flat else ''}mp_rank_00_model_states.pt")
    loops.deepspeed().comm.barrier()


_FILES = {"fp32": "", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


@both
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks
def test_a_universal_checkpoint_of_deepspeed_goes_on(stage, folder):
    engine = _begin(stage)
    batches = training.vector_batches(5, 2 * engine.world_size)
    loops.train(engine, batches[:3], 2)
    _write_universal(f"{folder}/global_step3_universal", engine, is_flat=stage == 3, epoch=3)
    expected, rates = loops.train(engine, batches[3:], 2), engine.get_lr()
    engine.destroy()
    if engine.global_rank == 0:  # as DeepSpeed writes it, beside the folder that was converted
        os.makedirs(f"{folder}/global_step3")
        for name, text in (("latest", "global_step3"), ("latest_universal", "global_step3_universal"), ("global_step3/mp_rank_00_model_states.pt", "")):
            with open(f"{folder}/{name}", "w") as file:
                file.write(text)
    loops.deepspeed().comm.barrier()
    for more in ({}, {"checkpoint": {"load_universal": True}}):
        other = _begin(stage, **more)
        path, state = other.load_checkpoint(folder)
        assert path == f"{folder}/global_step3_universal" and state == {"epoch": 3}
        assert (other.global_steps, other.micro_steps) == (3, 6) and other.lr_scheduler.last_batch_iteration == 2
        assert loops.train(other, batches[3:], 2) == expected and other.get_lr() == rates
        other.destroy()
    assert sorted(os.listdir(folder)) == ["global_step3", "global_step3_universal", "latest", "latest_universal"]


class _Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.frozen, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).requires_grad_(False), torch.nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        return self.last(self.frozen(self.first(x).tanh())).mean(-1, keepdim=True) * self.scale


def _save_tied(folder):
    engine = loops.begin(_Tied(), loops.config(3, bf16={"enabled": True}))
    loops.train(engine, [[[one.bfloat16() for one in batch] for batch in step] for step in training.vector_batches(2, engine.world_size)])
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    masters = {name: engine.ebb.gather(name, master=True) for name in engine.ebb.names_of_entries()}
    engine.destroy()
    return masters


def test_a_checkpoint_is_read_without_an_engine(one, two, tmp_path):
    folder = str(tmp_path)
    masters = two.run(_save_tied, folder)[0]
    one.run(_read_tied, folder, masters)


def _read_tied(folder, masters):
    from safetensors.torch import load_file

    loops.deepspeed()
    from deepspeed.utils import zero_to_fp32

    values = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert set(values) == set(_Tied().state_dict()) and values["last.weight"] is values["first.weight"] and values["scale"].tolist() == [2]
    assert all(torch.equal(values[name], value.float()) for name, value in masters.items())
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "global_step2", exclude_frozen_parameters=True)
    assert set(values) - set(trained) == {"frozen.weight", "frozen.bias"}
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(_Tied(), folder)
    assert torch.equal(model.last.weight, masters["first.weight"])
    # As programs type it: the script, and Lightning's calls.
    out = f"{folder}/out"
    subprocess.run([sys.executable, f"{folder}/zero_to_fp32.py", folder, out], check=True)
    assert all(torch.equal(value, values[name]) for name, value in torch.load(f"{out}/pytorch_model.bin").items())
    arguments, sys.argv = sys.argv, ["zero_to_fp32.py", folder, out, "--safe_serialization", "--max_shard_size", "300", "-t", "global_step2"]
    zero_to_fp32.main()
    with open(f"{out}/model.safetensors.index.json") as file:
        files = json.load(file)["weight_map"]
    assert len(set(files.values())) > 1 and set(values) - set(files) == {"last.weight"}
    assert all(torch.equal(load_file(f"{out}/{file}")[name], values[name]) for name, file in files.items())
    sys.argv[-1] = "none"
    with pytest.raises(SystemExit, match="zero_to_fp32.py: Directory '.*/none' doesn't exist"):
        zero_to_fp32.main()
    sys.argv = arguments
    tag = f"{folder}/global_step2"
    assert torch.load(zero_to_fp32.get_model_state_file(tag, 3)) == {"epoch": 7}
    assert torch.load(zero_to_fp32.get_optim_files(tag)[0])["optimizer_state_dict"]["zero_stage"] == 3
