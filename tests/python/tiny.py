"""Tiny models of the types that transformers has a table of conversions for, from their configurations' own defaults with small sizes."""

from __future__ import annotations

import torch
import transformers
from transformers.models.auto import modeling_auto

_SIZES = dict(
    num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8, vocab_size=160,
    moe_intermediate_size=16, n_routed_experts=4, num_local_experts=4, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64, d_model=32,
    d_ff=32, num_layers=2, num_heads=4, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=4,
    decoder_attention_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1,
    moe_k=2, moe_topk=2, moe_num_experts=4, patch_size=4, image_size=16, shared_expert_intermediate_size=16, depth=2, embed_dim=32,
    moe_shared_expert_intermediate_size=16, out_hidden_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64, ffn_dim=32, hidden_dim=32,
    projection_dim=32, n_shared_experts=1, first_k_dense_replace=1, num_encoder_layers=2, num_decoder_layers=2, dim=32, num_queries=8,
    expert_ffn_hidden_size=16, ffn_hidden_size=32, attention_hidden_size=32, global_head_dim=8,
)
_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
# What small sizes need beside themselves.
_MORE = {
    "inkling2_text": {"unpadded_vocab_size": 150},
    "ernie4_5_vl_moe": {"text_config.moe_intermediate_size": [16, 8], "text_config.rope_parameters.mrope_section": [1, 1, 2]},
}
PARAMETERS_MAX = 60_000_000


def _shrink(config: transformers.PreTrainedConfig) -> None:
    for name, size in _SIZES.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, min(size, getattr(config, name)))
    for name, number in _IDS.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, number)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list):
            setattr(config, name, [*dict.fromkeys(kinds), *kinds][: getattr(config, "num_hidden_layers", 2)])
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PreTrainedConfig):
            _shrink(value)


def class_of(model_type: str) -> type:
    """The type's class with the most modules that are trained."""
    names: list[str] = []
    for name, table in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES") and model_type in table:
            names += table[model_type] if isinstance(table[model_type], (tuple, list)) else [table[model_type]]
    wanted = ("CausalLM", "ConditionalGeneration", "ForPreTraining")
    return getattr(transformers, min(names, key=lambda name: next((i for i, part in enumerate(wanted) if part in name), len(wanted))))


def config_of(model_type: str) -> transformers.PreTrainedConfig:
    config = transformers.CONFIG_MAPPING[model_type]()
    _shrink(config)
    for path, value in _MORE.get(model_type, {}).items():
        *parts, last = path.split(".")
        owner = config
        for part in parts:
            owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
        owner.__setitem__(last, value) if isinstance(owner, dict) else setattr(owner, last, value)
    return config


def model_of(model_type: str) -> transformers.PreTrainedModel:
    config, kind = config_of(model_type), class_of(model_type)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > PARAMETERS_MAX:
        raise ValueError(f"{model_type} has {size} parameters with these sizes")
    torch.manual_seed(1)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    return model.eval()
