"""Writes what a command of another package needs into this folder: a tiny model, data, the JSON, options. Says the command and its environment.

LLaMA-Factory's and ms-swift's commands start the ranks by themselves. The case has "kind" (sft, dpo, reward), "stage" and "lora"."""

import json
import sys
from pathlib import Path

from program import STEPS, case, config, sentences, tiny_llama, tokenizer

FOLDER = Path.cwd()
SHARED = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": STEPS,
    "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "save_steps": STEPS,
    "report_to": "none", "seed": 1, "output_dir": str(FOLDER / "output"), "deepspeed": str(FOLDER / "ds.json"), "ddp_backend": "gloo",
    "gradient_checkpointing": False, "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0,
}
ENVIRONMENT = {"NPROC_PER_NODE": "2", "ACCELERATE_USE_CPU": "true"}


def pairs(count: int) -> list[tuple[str, str, str]]:
    return list(zip(sentences(count, "question"), sentences(count, "good"), sentences(count, "bad")))


def llamafactory() -> list[str]:
    """llamafactory-cli train FILE.yaml, which is JSON here."""
    kind = case()["kind"]
    ranking = kind != "sft"
    rows = [
        {"instruction": question, "input": "", **({"chosen": good, "rejected": bad} if ranking else {"output": good})} for question, good, bad in pairs(48)
    ]
    columns = {"prompt": "instruction", "query": "input", **({"chosen": "chosen", "rejected": "rejected"} if ranking else {"response": "output"})}
    described = {name: {"file_name": f"{name}.json", "ranking": ranking, "columns": columns} for name in ("train", "held")}
    write("train.json", rows[:40]), write("held.json", rows[40:]), write("dataset_info.json", described)
    write("train.yaml", {
        **SHARED, "model_name_or_path": str(FOLDER / "model"), "stage": {"reward": "rm"}.get(kind, kind), "do_train": True,
        "finetuning_type": "lora" if case().get("lora") else "full", "lora_target": "q_proj,v_proj", "dataset_dir": str(FOLDER), "dataset": "train",
        "eval_dataset": "held", "template": "default", "cutoff_len": 128, "disable_gradient_checkpointing": True, "overwrite_cache": True,
        "gradient_checkpointing": None, "save_only_model": True,
    })
    ENVIRONMENT["FORCE_TORCHRUN"] = "1"
    return ["llamafactory-cli", "train", "train.yaml"]


def swift() -> list[str]:
    """swift sft, swift rlhf."""
    kind = case()["kind"]
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": good}], **({"rejected_response": bad} if kind != "sft" else {})}
        for question, good, bad in pairs(48)
    ]
    lines("train.jsonl", rows[:40]), lines("held.jsonl", rows[40:])
    options = {
        **SHARED, "model": str(FOLDER / "model"), "model_type": "llama", "template": "default", "torch_dtype": "float32", "use_hf": True,
        "tuner_type": "lora" if case().get("lora") else "full", "target_modules": ["q_proj", "v_proj"], "dataset": "train.jsonl", "val_dataset": "held.jsonl",
        "max_length": 128, "dataset_num_proc": 1, "save_only_model": True,
    }
    words = ["swift", "sft"] if kind == "sft" else ["swift", "rlhf", "--rlhf_type", {"reward": "rm"}.get(kind, kind)]
    for name, value in options.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else str(value)])]
    return words


def write(name: str, value: object) -> None:
    (FOLDER / name).write_text(json.dumps({key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value))


def lines(name: str, rows: list[dict]) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


tiny_llama().save_pretrained("model")
tokenizer().save_pretrained("model")
write("ds.json", config())
words = {"llamafactory": llamafactory, "swift": swift}[sys.argv[1]]()
print("COMMAND " + json.dumps({"command": words, "environment": ENVIRONMENT}))
