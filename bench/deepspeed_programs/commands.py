"""Writes what a command of another package needs into this folder: a tiny model, data, the JSON, options. Says the command and its environment.

LLaMA-Factory's and ms-swift's commands start the ranks by themselves, and torchrun axolotl's. The case has "kind" (sft, dpo, reward), "stage" and "lora"."""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny import CHAT, LLAMA, SPECIAL, STEPS, case, config, sentences, words

FOLDER = Path.cwd()
SHARED = {
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": STEPS,
    "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "save_steps": STEPS,
    "report_to": "none", "seed": 1, "output_dir": str(FOLDER / "output"), "deepspeed": str(FOLDER / "ds.json"), "ddp_backend": "gloo",
    "gradient_checkpointing": False, "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0,
}
ENVIRONMENT = {"NPROC_PER_NODE": "2"}  # ACCELERATE_USE_CPU would have accelerate pass DeepSpeed by, for plain data parallelism


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
        "eval_dataset": "held", "template": "default", "cutoff_len": 256, "disable_gradient_checkpointing": True, "overwrite_cache": True,
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
        "max_length": 256, "dataset_num_proc": 1, "save_only_model": True, "fp16": False, "bf16": False,
    }
    command = ["swift", "sft"] if kind == "sft" else ["swift", "rlhf", "--rlhf_type", {"reward": "rm"}.get(kind, kind)]
    for name, value in options.items():
        command += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else str(value)])]
    return command


def axolotl() -> list[str]:
    """torchrun axolotl_train.py; its train.yaml is JSON here."""
    ranking = case()["kind"] != "sft"
    rows = [{"prompt": question, "chosen": good, **({"rejected": bad} if ranking else {})} for question, good, bad in pairs(48)]
    lines("train.jsonl", rows[:40]), lines("held.jsonl", rows[40:])
    columns = {"field_instruction": "prompt", "field_output": "chosen", "no_input_format": "{instruction}"}
    data = {"ds_type": "json", "split": "train", "type": {"field_prompt": "prompt", "prompt_format": "{prompt}"} if ranking else columns}
    shared = {key: SHARED[key] for key in (
        "gradient_accumulation_steps", "learning_rate", "max_steps", "warmup_steps", "logging_steps", "eval_steps", "save_steps", "seed", "output_dir",
        "deepspeed", "gradient_checkpointing",
    )}
    lora = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"]}
    write("train.yaml", {
        **shared, **(lora if case().get("lora") else {}), "base_model": str(FOLDER / "model"), "lr_scheduler": "cosine", "micro_batch_size": 2,
        "optimizer": "adamw_torch", "sequence_len": 256, "datasets": [{"path": "train.jsonl", **data}], "test_datasets": [{"path": "held.jsonl", **data}],
        "dataset_prepared_path": "prepared", "dataset_num_proc": 1, "attn_implementation": "sdpa", "bf16": False, "fp16": False, "tf32": False,
        "save_only_model": True, "lora_qkv_kernel": False, "lora_mlp_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False,
        **({"rl": "dpo"} if ranking else {}),
        # Without this the model is loaded onto the GPU of the rank's number. Stage 3 leaves that to zero.Init.
        **({"max_memory": {"cpu": "1GiB"}} if case()["stage"] < 3 else {}),
    })
    ENVIRONMENT.update(AXOLOTL_DO_NOT_TRACK="1")
    return ["torchrun", "--nproc-per-node", "2", str(Path(__file__).with_name("axolotl_train.py"))]


def write(name: str, value: object) -> None:
    (FOLDER / name).write_text(json.dumps({key: one for key, one in value.items() if one is not None} if isinstance(value, dict) else value))


def lines(name: str, rows: list[dict]) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_model() -> None:
    """As transformers' save_pretrained() writes it, without the time that its import takes."""
    made, width, inner = np.random.default_rng(1), LLAMA["hidden_size"], LLAMA["intermediate_size"]
    keys = width * LLAMA["num_key_value_heads"] // LLAMA["num_attention_heads"]
    shapes = {"model.embed_tokens": (LLAMA["vocab_size"], width), "lm_head": (LLAMA["vocab_size"], width), "model.norm": (width,)}
    for at in range(LLAMA["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner), "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes.update({f"model.layers.{at}.{name}": shape for name, shape in parts.items()})
    values = {
        f"{name}.weight": (made.standard_normal(shape) * 0.02 if len(shape) == 2 else np.ones(shape)).astype(np.float32) for name, shape in shapes.items()
    }
    (FOLDER / "model").mkdir()
    save_file(values, FOLDER / "model" / "model.safetensors", metadata={"format": "pt"})
    write("model/config.json", {**LLAMA, "torch_dtype": "float32", "architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False})
    write("model/tokenizer_config.json", {**SPECIAL, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT})
    words().save(str(FOLDER / "model" / "tokenizer.json"))


save_model()
write("ds.json", config())
command = {"llamafactory": llamafactory, "swift": swift, "axolotl": axolotl}[sys.argv[1]]()
print("COMMAND " + json.dumps({"command": command, "environment": ENVIRONMENT}))
