"""Architectures of transformers with random weights against plain torch: two ranks, stage 3, SGD."""

import os

import pytest
import torch
import training
from ranks import on_one, on_two
from training import compare, config, has_bits_of_torch

WIDTH, INNER, HEADS, LAYERS, VOCABULARY = 32, 64, 4, 3, 96
_DECODER = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_ENCODER = dict(hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0)
_TEXT = dict(_ENCODER, vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0)
_IMAGE = dict(_ENCODER, image_size=16, patch_size=8)
_PAIR = dict(vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
             encoder_ffn_dim=INNER, decoder_ffn_dim=INNER, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
             bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)

# Model, configuration, its options, what a batch is.
ARCHITECTURES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32,
             n_inner=INNER, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=2), "tokens"),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER, "tokens"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", dict(_DECODER, tie_word_embeddings=True), "tokens"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", dict(_DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=INNER,
                  head_dim=8), "tokens"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", dict(_DECODER, num_local_experts=4, num_experts_per_tok=2), "tokens"),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", dict(_DECODER, head_dim=8), "tokens"),
    "opt": ("OPTForCausalLM", "OPTConfig", dict(vocab_size=VOCABULARY, hidden_size=WIDTH, word_embed_proj_dim=WIDTH, ffn_dim=INNER,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, max_position_embeddings=32, dropout=0.0, pad_token_id=0, bos_token_id=1,
            eos_token_id=2), "tokens"),
    "bert": ("BertForSequenceClassification", "BertConfig", _TEXT, "classes"),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", dict(_TEXT, embedding_size=16, classifier_dropout_prob=0.0, bos_token_id=1, eos_token_id=2), "classes"),
    "deberta_v2": ("DebertaV2ForSequenceClassification", "DebertaV2Config", dict(_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
                   "classes"),
    "t5": ("T5ForConditionalGeneration", "T5Config", dict(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=INNER, num_layers=2, num_heads=HEADS,
           dropout_rate=0.0, pad_token_id=0, decoder_start_token_id=0), "tokens"),
    "bart": ("BartForConditionalGeneration", "BartConfig", dict(_PAIR, max_position_embeddings=32, forced_eos_token_id=2), "tokens"),
    "vit": ("ViTForImageClassification", "ViTConfig", _IMAGE, "images"),
    "clip": ("CLIPModel", "CLIPConfig", dict(projection_dim=WIDTH, text_config=dict(_TEXT, attention_dropout=0.0, bos_token_id=1, eos_token_id=2),
             vision_config=dict(_IMAGE, attention_dropout=0.0)), "pairs"),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", dict(_PAIR, num_mel_bins=8, max_source_positions=20, max_target_positions=32),
                "sounds"),
    "mamba": ("MambaForCausalLM", "MambaConfig", dict(vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=8, num_hidden_layers=LAYERS,
              pad_token_id=0, bos_token_id=1, eos_token_id=2), "tokens"),
}

SELECTED = list(ARCHITECTURES) if os.environ.get("EBB_FULL") else ["albert", "clip"]  # of tests that take minutes for all


def batches_of(kind, steps, each):
    generator = torch.Generator().manual_seed(5)
    ids = lambda: torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    image = lambda: torch.randn(2, 3, 16, 16, generator=generator)

    def batch():
        if kind == "tokens":
            one = ids()
            return {"input_ids": one, "labels": one}
        if kind == "classes":
            return {"input_ids": ids(), "labels": torch.tensor([0, 1])}
        if kind == "images":
            return {"pixel_values": image(), "labels": torch.tensor([0, 1])}
        if kind == "pairs":
            return {"input_ids": ids(), "pixel_values": image(), "return_loss": True}
        return {"input_features": torch.randn(2, 8, 40, generator=generator), "labels": ids()}

    return [[batch() for _ in range(each)] for _ in range(steps)]


def _make(name, checkpoints=False):
    import transformers

    model, settings, options, _ = ARCHITECTURES[name]
    torch.manual_seed(1)
    made = getattr(transformers, model)(getattr(transformers, settings)(**options))
    if checkpoints:
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


@pytest.mark.parametrize("name", ARCHITECTURES)
@on_two
def test_an_architecture_of_transformers(name):
    batches = batches_of(ARCHITECTURES[name][3], 3, 2)
    compare(lambda: _make(name), batches, optimizer=training.SGD, settings=config(optimizer=training.SGD, ebb={"timeout_seconds": 100}),
            example=batches[0][0] if name in ("llama", "t5", "deberta_v2") else None)


@pytest.mark.parametrize("name", SELECTED)
@on_one
def test_one_rank_has_the_bits_of_torch(name):
    """Over 20 steps. The losses of both runs left alone differ by 2e-6 at most."""
    batches = batches_of(ARCHITECTURES[name][3], 20, 1)
    has_bits_of_torch(lambda: _make(name), batches)
    compare(lambda: _make(name), batches, optimizer=training.SGD, example=batches[0][0])


def _digest(name, stage, checkpoints, offload):
    batches = batches_of(ARCHITECTURES[name][3], 3, 4)
    settings = config(stage, optimizer=training.SGD, gradient_accumulation_steps=2, ebb={"reduce_at": "step"}, zero=offload)
    return training.with_engine(_make(name, checkpoints), batches, settings=settings, accumulate=2, example=batches[0][0], after=training.digest)[1]


def _places(stage, folder):
    """What the JSON says of each tier that a stage can offload to."""
    yield {}
    for device in ("cpu", "nvme") if stage > 0 else ():
        to = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
        yield {"offload_optimizer": to} | ({"offload_param": to} if stage == 3 else {})


def _gradients_of_torch(name, checkpoints):
    model = _make(name, checkpoints)
    model(**batches_of(ARCHITECTURES[name][3], 1, 1)[0][0]).loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _checkpointing_has_other_bits(name):
    """In torch itself: t5's does, because gradients of what all blocks share are added in another order."""
    pairs = zip(_gradients_of_torch(name, False), _gradients_of_torch(name, True))
    return not all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", SELECTED)
def test_one_digest_over_stages_tiers_and_checkpointing(two, tmp_path, name):
    kinds = (False, True) if _make(name).supports_gradient_checkpointing else (False,)
    digests = {}
    for stage in range(4):
        for offload in _places(stage, str(tmp_path)):
            for checkpoints in kinds:
                digests.setdefault(checkpoints, set()).add(two.run(_digest, name, stage, checkpoints, offload)[0])
    assert all(len(of_kind) == 1 for of_kind in digests.values()), digests
    assert len(kinds) == 1 or digests[False] == digests[True] or _checkpointing_has_other_bits(name)
