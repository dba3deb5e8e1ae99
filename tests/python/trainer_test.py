"""transformers' Trainer on the engine against transformers' own: losses, parameters, evaluation, checkpoints, adapters."""

import json
import logging
import os
import pathlib

import pytest
import torch
import training
from ranks import on_one, on_ranks, on_two
from training import gpt2, llama, offloaded, token_batches

import ebb

EXACT = {"optim": "sgd", "learning_rate": 0.0625, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}  # products with 1/16 are exact
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}


class Sequences(torch.utils.data.Dataset):
    def __init__(self, number):
        self.ids = [batch["input_ids"][0] for (batch,) in token_batches(number, 1, batch=1)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def arguments(folder, **more):
    import transformers

    ebb.world()  # ranks meet before torch.distributed takes the port
    logging.getLogger("transformers").setLevel(logging.ERROR)
    settings = {
        "use_cpu": True, "per_device_train_batch_size": 2, "report_to": [], "logging_steps": 1, "disable_tqdm": True, "max_steps": 5,
        "save_strategy": "no", "logging_nan_inf_filter": False, "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(folder, **{**settings, **more})


def ours(model, folder, samples=40, config=None, evaluated=None, options=None, **more):
    from ebb.integrations.transformers import Trainer

    return Trainer(
        model, arguments(folder, **more), train_dataset=Sequences(samples), eval_dataset=evaluated and Sequences(evaluated),
        ebb_config={"zero_optimization": ZERO} if config is None else config, ebb_options=options,
    )


def theirs(model, folder, samples=40, evaluated=None, **more):
    import transformers

    return transformers.Trainer(
        model, arguments(folder, **more), train_dataset=Sequences(samples), eval_dataset=evaluated and Sequences(evaluated)
    )


def logged(trainer, key="loss"):
    return [row[key] for row in trainer.state.log_history if key in row]


def same_parameters(trainer, plain, tolerance=0.0):
    values = trainer.engine.state_dict()
    for name, value in plain.state_dict().items():
        assert (values[name] - value).abs().max().item() <= tolerance, name


ACCUMULATED = {"gradient_accumulation_steps": 3, "max_steps": -1, "num_train_epochs": 2}


@pytest.mark.parametrize("ranks, more", [("one", {}), ("one", ACCUMULATED), ("two", {})], indirect=["ranks"], ids=["", "accumulated", "data parallel"])
@on_ranks
def test_bits_are_those_of_transformers(folder, more):
    """An update of SGD is one product and one sum, and gradients are summed in the order of the micro-batches. 18 batches of 2 and 3 a step; 40
    samples are 20 batches, so that each epoch ends with a step of 2."""
    plain = theirs(llama(), folder, **EXACT, **more)
    plain.train()
    trainer = ours(llama(), folder, **EXACT, **more)
    trainer.train()
    assert logged(trainer) == logged(plain) and len(logged(plain)) == trainer.state.global_step > 3
    same_parameters(trainer, plain.model)
    trainer.engine.close()


@pytest.mark.parametrize("accumulate", [1, 2])
@on_two
def test_adamw_with_clipping_and_a_schedule(folder, accumulate):
    """AdamW, clipping, decay of all but norms and biases, and a falling rate: the roundings of an update and of the norm differ. An update is
    at most some rates of 1e-3, of which 1e-7 is lost a step; losses lie within the tolerance of the other tests against torch."""
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "warmup_steps": 2, "gradient_accumulation_steps": accumulate}
    plain = theirs(gpt2(), folder, **settings)
    plain.train()
    trainer = ours(gpt2(), folder, **settings)
    trainer.train()
    for key, tolerance in (("loss", 2e-6), ("grad_norm", 1e-5), ("learning_rate", 1e-9)):
        assert len(logged(plain, key)) == 5
        for mine, expected in zip(logged(trainer, key), logged(plain, key)):
            assert abs(mine - expected) <= tolerance * max(1.0, abs(expected)), key
    assert {group["weight_decay"] for group in trainer.engine.param_groups} == {0.1, 0.0}
    same_parameters(trainer, plain.model, 2e-5)
    trainer.engine.close()


def _resumed(folder, config):
    """With dropout and shuffled data, so that random states count."""
    more = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3, "max_steps": 7, "gradient_accumulation_steps": 2}

    def make():
        model = gpt2()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        return model

    whole = ours(make(), folder, config=config, **more)
    whole.train()
    expected = training.digest(whole.engine), logged(whole)
    whole.engine.close()
    resumed = ours(make(), folder, config=config, **more)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert (training.digest(resumed.engine), logged(resumed)) == expected
    resumed.engine.close()


def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not_interrupted(two, tmp_path):
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    two.run(_resumed, str(tmp_path / "a"), None)
    two.run(_resumed, str(tmp_path / "b"), {"zero_optimization": {**ZERO, **offloaded(str(tmp_path))}, "scheduler": schedule})


@on_two
def test_evaluation_the_best_model_and_what_is_saved(folder):
    import transformers

    more = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "load_best_model_at_end": True,
            "learning_rate": 0.5, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    first = theirs(llama(), folder + "/plain", evaluated=6, **more).evaluate()["eval_loss"]
    plain = theirs(llama(), folder + "/plain", evaluated=6, **more)  # anew: one that was evaluated is not made data-parallel
    plain.train()
    trainer = ours(llama(), folder + "/ours", evaluated=6, **more)
    assert abs(trainer.evaluate()["eval_loss"] - first) < 2e-6
    trainer.train()
    assert logged(trainer, "eval_loss") == logged(plain, "eval_loss")
    assert trainer.state.best_model_checkpoint is not None
    assert os.path.basename(trainer.state.best_model_checkpoint) == os.path.basename(plain.state.best_model_checkpoint)
    values = trainer.engine.state_dict()
    trainer.save_model()
    trainer.engine.close()
    for saved in (trainer.state.best_model_checkpoint, folder + "/ours"):
        for name, value in transformers.AutoModelForCausalLM.from_pretrained(saved).state_dict().items():
            assert torch.equal(value, values[name]), name


@on_one
def test_an_adapter_on_a_base_on_the_disk(folder):
    import peft

    def make():
        torch.manual_seed(3)
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False))

    plain = theirs(make(), folder, **EXACT)
    plain.train()
    trainer = ours(make(), folder, config={"zero_optimization": {**ZERO, **offloaded(folder)}}, save_steps=3, **{**EXACT, "save_strategy": "steps"})
    trainer.train()
    assert logged(trainer) == logged(plain)
    same_parameters(trainer, plain.model)
    trainer.save_model(folder + "/adapter")
    trainer.engine.close()
    loaded = peft.PeftModel.from_pretrained(llama(), folder + "/adapter")
    expected = plain.model.state_dict()
    assert any("lora" in name for name in loaded.state_dict())
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    resumed = ours(make(), folder, config={"zero_optimization": ZERO}, **EXACT)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    same_parameters(resumed, plain.model)
    resumed.engine.close()


@on_one
def test_peft_loads_a_prompt(folder):
    import peft

    model = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    trainer = ours(model, folder, samples=8, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    loaded = peft.PeftModel.from_pretrained(llama(), f"{folder}/checkpoint-2").state_dict()
    name = "prompt_encoder.default.embedding.weight"
    assert torch.equal(loaded[name], trainer.engine.gather(name))
    trainer.engine.close()


@on_one
def test_a_file_whose_values_are_auto(folder):
    path = folder + "/ds.json"
    with open(path, "w") as file:
        json.dump({"bf16": {"enabled": "auto"}, "zero_optimization": ZERO, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}, file)
    plain = theirs(llama(), folder, learning_rate=1e-3)
    plain.train()
    trainer = ours(llama(), folder, config=path, learning_rate=1e-3, bf16=True)
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    for mine, expected in zip(logged(trainer), logged(plain)):
        assert abs(mine - expected) < 2e-2 * expected
    trainer.engine.close()


@on_one
def test_a_model_that_is_made_anew_begins_anew(folder):
    from ebb.integrations.transformers import Trainer

    trainer = Trainer(model_init=lambda: llama(), args=arguments(folder), train_dataset=Sequences(20), ebb_config={"zero_optimization": ZERO})
    losses = []
    for _ in range(2):
        trainer.train()
        losses.append(logged(trainer))
    assert losses[0] == losses[1]
    trainer.engine.close()


def ours_of(kind):
    """A trainer that others have derived from transformers' own, such as TRL's, on the engine."""
    from ebb.integrations.transformers import Trainer

    return type("Ours", (Trainer, kind), {})


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@on_one
def test_a_trainer_with_a_reference_model(folder, sharded):
    import transformers

    class Preference(transformers.Trainer):
        """Does what TRL's DPOTrainer does: prepares the reference at once, and compares with it in the loss."""

        def __init__(self, *arguments, reference, **keywords):
            super().__init__(*arguments, **keywords)
            self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            with torch.no_grad():
                expected = self.reference(input_ids=inputs["input_ids"]).logits
            return (model(input_ids=inputs["input_ids"]).logits - expected).square().mean()

    make_reference = lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 10.0}).requires_grad_(False)
    plain = Preference(llama(), arguments(folder, **EXACT), train_dataset=Sequences(10), reference=make_reference())
    plain.train()
    reference = make_reference()
    of_reference = ebb.initialize(reference, training.config()) if sharded else None
    schedule = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0625, "warmup_max_lr": 0.0625, "warmup_num_steps": "auto"}}
    trainer = ours_of(Preference)(
        llama(), arguments(folder, **{**EXACT, "max_steps": -1, "num_train_epochs": 1}), train_dataset=Sequences(10), reference=reference,
        ebb_config={"zero_optimization": ZERO, "scheduler": schedule},
    )
    assert trainer.engine is None  # the number of steps is not known yet
    trainer.train()
    assert logged(trainer) == logged(plain) and len(logged(plain)) == 5
    same_parameters(trainer, plain.model)
    trainer.engine.close()
    if sharded:
        of_reference.close()


@on_one
def test_what_contradicts_the_arguments_is_named(folder):
    import transformers
    from ebb.integrations.transformers import filled

    args = arguments(folder, learning_rate=3e-4, gradient_accumulation_steps=4, warmup_steps=10, fp16=False)
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": "auto"}}
    made = filled({"train_batch_size": "auto", "scheduler": schedule, "optimizer": {"type": "AdamW", "params": {"betas": "auto"}}}, args, 100)
    assert made["train_batch_size"] == 8 and made["gradient_clipping"] == 1.0
    assert made["scheduler"]["params"] == {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_max_lr": 3e-4}
    assert made["optimizer"]["params"] == {"betas": [0.9, 0.999]}
    with pytest.raises(ebb.Error, match="'gradient_clipping' is 0.5, but max_grad_norm is 1.0; 'optimizer.params.lr' is 0.1") as caught:
        filled({"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, args, 100)
    assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(ebb.Error, match="total_num_steps' is \"auto\""):
        filled({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}, args, -1)
    with pytest.raises(ebb.Error, match="optim='adafactor'.*into the JSON"):
        filled({}, arguments(folder, optim="adafactor"), 100)
    args.sync_ref_model = True  # an argument of TRL's
    with pytest.raises(ebb.Error, match="sync_ref_model=.*reads parameters between steps"):
        ours_of(transformers.Trainer)(llama(), args, train_dataset=Sequences(4))
    args.sync_ref_model = False
    with pytest.raises(ebb.Error, match="optimizers="):
        from ebb.integrations.transformers import Trainer

        model = llama()
        Trainer(model, args, train_dataset=Sequences(4), optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None))


@on_one
def test_a_file_with_null_comments_or_a_key_twice(folder):
    from ebb.integrations.transformers import filled, read_config

    file = pathlib.Path(folder) / "ds_config.json"
    file.write_bytes(b"\xef\xbb\xbf{\"scheduler\": null, \"bf16\": null, \"gradient_clipping\": \"auto\"}\r\n")
    made = filled(read_config(file), arguments(folder, bf16=True), 100)
    assert "scheduler" not in made and made["bf16"] == {"enabled": True} and made["gradient_clipping"] == 1.0
    file.write_text("{\n  // samples\n}")
    with pytest.raises(ebb.Error, match="line 2.*Write plain JSON, without comments"):
        read_config(file)
    with pytest.raises(ebb.Error, match="'stage' is there twice"):
        read_config('{"zero_optimization": {"stage": 2, "stage": 3}}')
