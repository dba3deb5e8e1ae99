"""Writes hugging_face_counts.json: random configs of each model type that ebb-plan counts, with the parameters that transformers makes of them
on the meta device. model_shape_test compares. `python hugging_face_counts.py hugging_face_counts.json`"""

import json
import random
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

PER_TYPE = 6


def common(r: random.Random) -> dict:
    keys = r.choice([1, 2, 4])
    heads = keys * r.choice([1, 2, 4])
    width = heads * r.choice([16, 32])
    return {
        "num_hidden_layers": r.randint(2, 4), "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": keys,
        "intermediate_size": r.choice([48, 96, 136]), "vocab_size": r.choice([100, 512]), "max_position_embeddings": 64,
        "tie_word_embeddings": r.random() < 0.5,
    }


def with_head_dim(sizes: dict, r: random.Random) -> dict:
    return {**sizes, "head_dim": r.choice([16, 24])}


def experts(r: random.Random, name: str = "num_experts") -> dict:
    count = r.choice([4, 6])
    return {name: count, "num_experts_per_tok": r.randint(1, 3), "moe_intermediate_size": r.choice([16, 40])}


def latent(r: random.Random) -> dict:
    return {
        "q_lora_rank": r.choice([None, 12, 20]), "kv_lora_rank": r.choice([8, 16]), "qk_rope_head_dim": 8, "qk_nope_head_dim": r.choice([8, 16]),
        "v_head_dim": r.choice([8, 12]), "n_shared_experts": r.choice([1, 2]), "first_k_dense_replace": r.choice([0, 1]), "n_group": 1, "topk_group": 1,
    }


def config_of(kind: str, r: random.Random) -> dict:
    sizes = common(r)
    heads = sizes["num_attention_heads"]
    flag = r.random() < 0.5
    if kind == "gpt2":
        return {
            "n_layer": sizes["num_hidden_layers"], "n_embd": sizes["hidden_size"], "n_head": heads, "n_positions": 64, "vocab_size": sizes["vocab_size"],
            "n_inner": r.choice([None, 48]),
        }
    if kind in ("llama", "granite", "smollm3"):
        return {**sizes, "attention_bias": flag, "mlp_bias": r.random() < 0.5}
    if kind in ("qwen3", "gemma", "glm4"):
        return {**with_head_dim(sizes, r), "attention_bias": flag}
    if kind in ("gemma2", "gemma3_text"):
        return with_head_dim(sizes, r)
    if kind == "mixtral":
        return {**sizes, "num_local_experts": 4, "num_experts_per_tok": 2}
    if kind == "gpt_oss":
        return {**with_head_dim(sizes, r), "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
    if kind == "qwen3_moe":
        return {**with_head_dim(sizes, r), **experts(r), "attention_bias": flag}
    if kind == "qwen2_moe":
        return {**sizes, **experts(r), "shared_expert_intermediate_size": r.choice([24, 56])}
    if kind == "glm4_moe":
        return {
            **with_head_dim(sizes, r), **experts(r, "n_routed_experts"), "attention_bias": flag, "use_qk_norm": r.random() < 0.5, "n_shared_experts": 1,
            "first_k_dense_replace": r.choice([0, 1]), "n_group": 1, "topk_group": 1,
        }
    if kind in ("deepseek_v2", "deepseek_v3"):
        return {**sizes, **experts(r, "n_routed_experts"), **latent(r), "num_key_value_heads": heads}
    if kind == "gpt_neox":
        return {**sizes, "attention_bias": flag}
    if kind == "falcon":
        return {
            "num_hidden_layers": sizes["num_hidden_layers"], "hidden_size": sizes["hidden_size"], "num_attention_heads": heads, "vocab_size": sizes["vocab_size"],
            "num_kv_heads": sizes["num_key_value_heads"], "new_decoder_architecture": flag, "multi_query": r.random() < 0.5, "bias": r.random() < 0.5,
            "parallel_attn": True if flag else r.random() < 0.5, "ffn_hidden_size": r.choice([48, 4 * sizes["hidden_size"]]),
        }
    if kind == "starcoder2":
        return {**sizes, "use_bias": flag}
    if kind == "stablelm":
        return {**sizes, "use_qkv_bias": flag, "use_parallel_residual": r.random() < 0.5}
    if kind in ("olmo2", "cohere"):
        return {**sizes, "attention_bias": flag}
    return sizes


KINDS = [
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "qwen2_moe", "phi3", "phi", "gpt_neox", "falcon",
    "starcoder2", "stablelm", "cohere", "olmo2", "granite", "smollm3", "glm4", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3",
]


def row(kind: str, keys: dict) -> dict:
    config = AutoConfig.for_model(kind, **keys, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    saved = json.loads(config.to_json_string())
    # The keys that a file has, without what no count depends on.
    kept = {name: saved.get(name, value) for name, value in keys.items()}
    return {"config": {"model_type": kind, **kept, "tie_word_embeddings": bool(saved.get("tie_word_embeddings", config.tie_word_embeddings))}, "parameters": parameters}


def text_of_qwen2_5_vl(r: random.Random) -> dict:
    """The language model of a multimodal one, whose file has a text_config."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    keys = common(r)
    half = keys["hidden_size"] // keys["num_attention_heads"] // 2
    tied = keys.pop("tie_word_embeddings")
    text = {**keys, "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [half // 2, half // 4, half // 4]}}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": keys["hidden_size"]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    parameters = sum(parameter.numel() for name, parameter in model.named_parameters() if "visual" not in name)
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    keys["model_type"] = "qwen2_5_vl_text"
    return {"config": {"model_type": "qwen2_5_vl", "tie_word_embeddings": is_tied, "text_config": keys}, "parameters": parameters}


def main(path: str) -> None:
    rows = []
    for kind in KINDS:
        r = random.Random(kind)
        rows += [row(kind, config_of(kind, r)) for _ in range(PER_TYPE)]
    r = random.Random("qwen2_5_vl")
    rows += [text_of_qwen2_5_vl(r) for _ in range(PER_TYPE)]
    with open(path, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


main(sys.argv[1])
