"""transformers' Trainer with TrainingArguments(deepspeed=): a run that is resumed has the numbers of one that was not."""

import itertools
import os

import loops
import pytest
import torch
from ranks import on_one

_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
_SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
ALL = list(itertools.product((1, 2, 3), (True, False), (True, False)))
SOME = ALL if os.environ.get("EBB_FULL") else [(3, False, True)]  # all take minutes: EBB_FULL=1


def _trainer(folder, stage, json_optimizer, json_schedule):
    import transformers

    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        **({"optimizer": _OPTIMIZER} if json_optimizer else {}), **({"scheduler": _SCHEDULE} if json_schedule else {}),
    }
    arguments = transformers.TrainingArguments(
        folder, deepspeed=config, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, save_steps=3, logging_steps=1,
        learning_rate=1e-2, warmup_steps=4, weight_decay=0.1, lr_scheduler_type="linear", report_to=[], seed=1, disable_tqdm=True,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64
    ))
    ids = torch.randint(0, 64, (24, 6), generator=torch.Generator().manual_seed(1))
    return transformers.Trainer(model, arguments, train_dataset=[{"input_ids": one, "labels": one} for one in ids])


def _logs(trainer):
    return [{key: row[key] for key in ("loss", "grad_norm", "learning_rate")} for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("stage, json_optimizer, json_schedule", SOME, ids=str)
@on_one
def test_a_resumed_run_has_the_same_numbers(stage, json_optimizer, json_schedule, folder):
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    loops.deepspeed()
    case = stage, json_optimizer, json_schedule
    first = _trainer(folder, *case)
    first.train()
    values = first.model_wrapped.module_state_dict()
    logs = _logs(first)
    rates = [row["learning_rate"] for row in logs]
    assert len(logs) == 6 and logs[-1]["loss"] < logs[0]["loss"] and len(set(rates)) > 2
    first.model_wrapped.destroy()
    second = _trainer(folder, *case)
    second.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert _logs(second) == logs
    assert all(torch.equal(value, values[name]) for name, value in second.model_wrapped.module_state_dict().items())
    second.model_wrapped.destroy()
    # A Trainer that is not collected yet has a configuration of stage 3, with which models of later tests would begin.
    unset_hf_deepspeed_config()
