"""State in and out: checkpoints, safetensors, meta models, suspension, groups, what a closed engine leaves."""

import gc
import os
import subprocess
import sys

import pytest
import torch
import training
from pitfalls_test import refused
from ranks import on_one, on_two
from torch import nn
from training import config, gpt2, llama, mlp, offloaded, squared_error, token_batches, vector_batches

import ebb


def train(engine, model, batches, loss_of=training.of_output):
    for of_step in batches:
        engine.backward(loss_of(model, of_step[engine.world.rank]))
        engine.step()
    return engine.report().loss


@on_two
def test_a_run_is_resumed_bit_for_bit_at_another_stage(folder):
    batches = token_batches(6, 2)
    model = llama()
    engine = ebb.initialize(model, config(), example=batches[0][0])
    train(engine, model, batches[:3])
    engine.save(folder, keep=2, trainer=b"place 3", of_this_rank=bytes([engine.world.rank]))
    last = train(engine, model, batches[3:])
    expected = training.digest(engine)
    engine.close()
    model = llama()
    engine = ebb.initialize(model, config(1), example=batches[0][0])
    assert engine.load(folder) == (3, b"place 3", bytes([engine.world.rank]))
    assert train(engine, model, batches[3:]) == last
    assert training.digest(engine) == expected
    engine.close()


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("parts", [False, True])
@on_two
def test_transformers_loads_what_is_saved(folder, make, parts):
    import transformers

    model = make()
    engine = ebb.initialize(model, config())
    expected = engine.state_dict()
    engine.save_pretrained(folder, file_bytes=20_000 if parts else 5_000_000_000)
    engine.close()
    if engine.world.rank != 0:
        return
    assert os.path.exists(f"{folder}/model.safetensors.index.json") == parts
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name


@on_two
def test_peft_loads_an_adapter_of_a_base_on_the_disk(folder):
    import peft

    def make():
        torch.manual_seed(3)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
        return peft.get_peft_model(llama(), settings)

    model = make()
    batches = token_batches(2, 2)
    engine = ebb.initialize(model, config(bf16={"enabled": True}, zero=offloaded(folder)), example=batches[0][0])
    train(engine, model, batches)
    values = engine.state_dict()
    engine.save_pretrained(folder + "/adapter", trainable_only=True)
    engine.close()
    if engine.world.rank == 0:
        loaded = peft.PeftModel.from_pretrained(llama(), folder + "/adapter")
        of_loaded = {name: value for name, value in loaded.state_dict().items() if "lora" in name}
        assert of_loaded
        for name, value in of_loaded.items():
            assert torch.equal(value, values[name].float()), name


@on_two
def test_a_prompt_is_saved(folder):
    import peft
    import safetensors.torch

    model = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    engine = ebb.initialize(model, config())
    train(engine, model, token_batches(1, 2))
    engine.save_pretrained(folder, trainable_only=True)
    saved = safetensors.torch.load_file(folder + "/adapter_model.safetensors")
    assert torch.equal(saved["prompt_embeddings"], engine.gather("prompt_encoder.default.embedding.weight"))
    engine.close()


@on_one
def test_a_prompt_that_peft_cannot_read_is_refused(folder):
    import peft

    model = peft.get_peft_model(llama(), peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2))
    engine = ebb.initialize(model, config())
    with pytest.raises(ebb.Error, match="multitask"):
        engine.save_pretrained(folder, trainable_only=True)
    engine.close()


@on_one
def test_peft_loads_an_adapter_that_transformers_made(folder):
    import peft
    import transformers.integrations.peft

    checks = transformers.integrations.peft.check_peft_version
    transformers.integrations.peft.check_peft_version = lambda **wanted: None  # the newest peft may be older than it asks for
    try:
        _saved_by_transformers(folder)
    finally:
        transformers.integrations.peft.check_peft_version = checks


def _saved_by_transformers(folder):
    import peft

    model = llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    engine = ebb.initialize(model, config())
    train(engine, model, token_batches(1, 1))
    engine.save_pretrained(folder, trainable_only=True)
    loaded = peft.PeftModel.from_pretrained(llama(), folder).state_dict()
    values = {f"base_model.model.{name}": value for name, value in engine.state_dict().items() if "lora" in name}
    assert values and all(torch.equal(value, loaded[name]) for name, value in values.items())
    engine.close()


@on_one
def test_a_file_that_has_no_weights_is_named(folder):
    file = f"{folder}/model.safetensors"
    for content in (b"", b"PK\3\4" + 40 * b"x", (2).to_bytes(8, "little") + b"{].....", (2).to_bytes(8, "little") + b"12....."):
        with open(file, "wb") as out:
            out.write(content)
        with ebb.empty_parameters():
            model = mlp()
        with pytest.raises(ebb.Error, match="is not a whole safetensors file"):
            ebb.initialize(model, config(), weights=file)


@on_two
def test_a_model_without_memory_reads_its_slices_from_files(folder):
    import transformers

    model = gpt2()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if ebb.world().rank == 0:
        model.save_pretrained(folder, max_shard_size="20KB")
    ebb.initialize(mlp(), config()).close()  # ranks meet: the files are there
    with ebb.empty_parameters():
        empty = transformers.GPT2LMHeadModel(model.config)
    empty.tie_weights()
    assert all(parameter.is_meta for parameter in empty.parameters())
    engine = ebb.initialize(empty, config(), weights=folder)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name]), name
    batches = token_batches(3, 2)
    loss = train(engine, empty, batches)
    engine.close()
    assert abs(loss - training.with_torch(gpt2(), batches)[-1]) < 1e-5


@on_two
def test_ranks_that_begin_differently():
    torch.manual_seed(ebb.world().rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    if ebb.world().size > 1:
        with pytest.raises(ebb.Error, match="0.weight"):
            ebb.initialize(model, config()).state_dict()
    engine = ebb.initialize(model, config(), values_of_rank_0=True)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).state_dict()
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected[name])
    engine.close()


@on_two
def test_one_parameter_is_written():
    model = mlp()
    engine = ebb.initialize(model, config())
    before = engine.state_dict()
    value = torch.arange(64.0).view(8, 8)
    engine.write("2.weight", value)
    after = engine.state_dict(rank=0)
    assert (after == {}) == (engine.world.rank != 0)
    if engine.world.rank == 0:
        for name in before:
            assert torch.equal(after[name], value if name == "2.weight" else before[name])
    with pytest.raises(ebb.Error, match=r"\[8, 8\]"):
        engine.write("2.weight", torch.zeros(3))
    engine.close()


@on_two
def test_a_suspended_engine_goes_on():
    batches = vector_batches(4, 2)
    losses = []
    for suspended in (False, True):
        model = mlp()
        engine = ebb.initialize(model, config())
        train(engine, model, batches[:2], squared_error)
        if suspended:
            engine.suspend()
            with pytest.raises(ebb.Error, match="suspended: call resume"):
                model(torch.ones(2, 8))
            engine.gather("0.weight")
            engine.resume()
        losses.append(train(engine, model, batches[2:], squared_error))
        engine.close()
    assert losses[0] == losses[1]


@on_two
def test_groups_have_their_own_rates():
    settings = config(optimizer={"type": "SGD", "params": {"lr": 0.5}}, ebb={"parameter_groups": {"biases": {"lr_factor": 0.0}}})
    model = mlp()
    engine = ebb.initialize(model, settings, groups={"biases": "bias"})
    before = engine.state_dict()
    assert {group["group"]: group["lr"] for group in engine.param_groups} == {"": 0.5, "biases": 0.0}
    train(engine, model, vector_batches(1, 2), squared_error)
    after = engine.state_dict()
    assert torch.equal(after["2.bias"], before["2.bias"]) and not torch.equal(after["2.weight"], before["2.weight"])
    engine.close()


@on_two
def test_tables_of_memory_and_communication():
    model = llama()
    settings = config()
    predicted = {(row.state, row.tier): row.predicted for row in ebb.predict_memory(llama(), settings, 2, example=token_batches(1, 1)[0][0])}
    assert "2 ranks" in ebb.plan(llama(), settings, 2)
    engine = ebb.initialize(model, settings, example=token_batches(1, 1)[0][0])
    train(engine, model, token_batches(2, 2))
    rows = {(row.state, row.tier): row for row in engine.memory()}
    for key, value in predicted.items():
        assert rows[key].predicted <= value
    assert sum(row.current for row in rows.values()) > 0
    moved = {row.operation: row for row in engine.communication()}
    assert moved["gather"].bytes == moved["gather"].predicted > 0
    assert engine.traffic() == []
    engine.close()


@on_two
def test_tensors_outlive_the_engine():
    model = mlp()
    engine = ebb.initialize(model, config())
    kept = []
    hook = model[0].register_forward_pre_hook(lambda module, arguments: kept.append(module.weight.data))
    with torch.no_grad():
        model(torch.ones(2, 8))
    hook.remove()
    engine.close()
    del engine
    gc.collect()
    assert kept[0].shape == (8, 8)
    if hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"):  # else its contents are another unit's, or undefined
        with pytest.raises(RuntimeError, match="'0.weight' has no value here, nor has a view of it"):
            kept[0].sum()
    refused(lambda: model(torch.ones(2, 8)), "'0.weight' is read by linear after its engine was closed")  # hooks are gone


LOOP = """
import os, sys, torch, ebb
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
engine = ebb.initialize(model, {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
loss = model(torch.ones(1, 4)).sum()
"""


def run_alone(text):
    return subprocess.run([sys.executable, "-c", LOOP + text], capture_output=True, text=True)


def test_a_process_may_exit_within_a_step():
    assert run_alone("").returncode == 0
    done = run_alone("raise ValueError('mine')")
    assert done.returncode == 1 and "mine" in done.stderr


def test_a_forked_child_gets_an_error():
    done = run_alone("""
child = os.fork()
if child == 0:
    try:
        engine.step()
    except ebb.Error as error:
        os._exit(7 if "forked" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
engine.backward(loss)
assert engine.step() and engine.report().applied
""")
    assert done.returncode == 0, done.stderr


def test_workers_of_a_loader_run_beside_the_engine():
    done = run_alone("""
data = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2, num_workers=2)
engine.drop()
for batch in data:
    engine.backward(model(batch).sum())
    engine.step()
assert engine.report().step == 4
""")
    assert done.returncode == 0, done.stderr


@on_two
def test_a_folder_that_was_used_has_the_last_model_alone(folder):
    model = llama()
    engine = ebb.initialize(model, config())
    listed = lambda: sorted(os.listdir(folder)) if engine.world.rank == 0 else None
    engine.save_pretrained(folder)
    one = listed()
    engine.write("model.norm.weight", torch.full((32,), 3.0))
    engine.save_pretrained(folder, file_bytes=20_000)
    if engine.world.rank == 0:
        import transformers

        assert "model.safetensors" not in listed()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.state_dict()["model.norm.weight"][0] == 3
    engine.save_pretrained(folder, file_bytes=60_000)
    if engine.world.rank == 0:
        parts = [name for name in listed() if name.startswith("model-")]
        assert parts and len({name.split("-of-")[1] for name in parts}) == 1
    engine.save_pretrained(folder)
    assert listed() == one
    engine.close()


def _save_fails(folder):
    model = mlp()
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    engine = ebb.initialize(model, config())
    errors = []
    for where, match in ((folder + "/file/model", "NotADirectoryError|FileExistsError"), (folder + "/model", "'phase' is torch.complex64")):
        with pytest.raises(ebb.Error, match=match) as caught:
            engine.save_pretrained(where)
        errors.append(str(caught.value))
    train(engine, model, vector_batches(1, 2), squared_error)
    engine.close()
    return errors


def test_what_rank_0_cannot_write_is_every_ranks_error(two, tmp_path):
    (tmp_path / "file").write_text("")
    first, second = two.run(_save_fails, str(tmp_path))
    assert [f"rank 0: {text}" for text in first] == second  # a rank's own error does not name it


@on_one
def test_buffers_are_read_from_files(folder):
    import safetensors.torch

    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = make()
    model[1].running_mean.fill_(7.0)
    model[1].num_batches_tracked.fill_(5)
    values = model.state_dict()
    safetensors.torch.save_file(values, folder + "/model.safetensors")
    with ebb.empty_parameters():
        model = make()
    engine = ebb.initialize(model, config(), weights=folder)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, values[name]), name
    engine.close()
    del values["1.running_var"]
    safetensors.torch.save_file(values, folder + "/model.safetensors")
    with ebb.empty_parameters():
        model = make()
    with pytest.raises(ebb.Error, match="no buffer '1.running_var'"):
        ebb.initialize(model, config(), weights=folder)
    assert model[0].weight.is_meta


@on_two
def test_a_save_beside_the_steps_that_come_has_the_step_before_them(folder):
    batches = token_batches(6, 2)
    engine = ebb.initialize(model := llama(), config(), example=batches[0][0])
    train(engine, model, batches[:3])
    ticket = engine.save(folder, trainer=b"place 3", asynchronous=True)
    assert engine.save(folder + "/other") is None  # waits for the first
    assert ticket.done()
    again = engine.save(folder + "/again", asynchronous=True)
    last = train(engine, model, batches[3:])
    again.wait()
    ticket.wait()
    assert again.done()
    expected = training.digest(engine)
    engine.close()
    with pytest.raises(ebb.Error, match="closed"):
        again.done()
    for saved in (folder, folder + "/again"):
        engine = ebb.initialize(model := llama(), config(), example=batches[0][0])
        assert engine.load(saved)[0] == 3
        assert train(engine, model, batches[3:]) == last and training.digest(engine) == expected
        engine.close()


@on_one
def test_one_run_at_a_time_saves_to_a_folder(folder):
    first, second = (ebb.initialize(llama(), config(), example=token_batches(1, 1)[0][0]) for _ in range(2))
    first.save(folder)
    with pytest.raises(ebb.Error, match=f"another run saves to '{folder}'.*give each run a folder of its own") as caught:
        second.save(folder)
    assert caught.value.code == "FAILED_PRECONDITION"
    first.close()
    assert second.load(folder)[0] == 0
    second.save(folder)
    second.close()


@on_one
def test_values_that_differ_for_one_parameter_are_an_error_that_names_both_keys():
    engine = ebb.initialize(model := gpt2(), config())
    values = model.state_dict()
    model.load_state_dict(values)
    values["lm_head.weight"] = values["lm_head.weight"] + 1
    with pytest.raises(ebb.Error, match="'transformer.wte.weight' and 'lm_head.weight' are one parameter") as caught:
        model.load_state_dict(values)
    assert caught.value.code == "INVALID_ARGUMENT"
    model.load_state_dict({"lm_head.weight": values["lm_head.weight"]}, strict=False)
    assert torch.equal(engine.gather("transformer.wte.weight"), values["lm_head.weight"])
    engine.close()
