"""On a GPU: torch's bits with SGD, at every stage and tier; AdamW beside torch's; two ranks."""

import os

import pytest
import torch
import transformers
from training import config, digest, offloaded, with_engine, with_torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
STEPS = 12
SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}}


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, attn_implementation="eager",
    )).cuda()


def batches() -> list[list[dict]]:
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(0, 256, (4, 64), generator=generator).cuda() for _ in range(STEPS)]
    return [[{"input_ids": of_step, "labels": of_step}] for of_step in ids]


def tiers(folder: str) -> list[dict]:
    ram = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return [{"stage": 0}, {"stage": 3}, {"stage": 3, **ram}, {"stage": 3, **offloaded(folder)}]


@pytest.mark.parametrize("optimizer, tolerance", [(SGD, 0), (ADAMW, 1e-6)], ids=["SGD", "AdamW"])
def test_has_torchs_losses_at_every_stage_and_tier(optimizer, tolerance, tmp_path):
    settings = [config(optimizer=optimizer, zero=zero, gradient_clipping=0) for zero in tiers(str(tmp_path))]
    expected = with_torch(make_model(), batches(), optimizer=optimizer, clip=float("inf"))
    first, *others = (with_engine(make_model(), batches(), settings=of_tier)[0] for of_tier in settings)
    assert all(losses == first for losses in others)
    assert all(abs(ours - theirs) <= tolerance * theirs for ours, theirs in zip(first, expected)), (first, expected)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_have_the_same_losses_on_the_device_and_from_the_disk(dtype, tmp_path):
    on_device, _, in_ram, on_disk = (
        with_engine(make_model(), batches(), settings=config(zero=zero, **{dtype: {"enabled": True}}))[0] for zero in tiers(str(tmp_path))
    )
    assert on_device == in_ram == on_disk


def _digests(folder: str) -> list[str]:
    """Of two ranks, at every stage and tier; and the losses beside torch's over both ranks' samples."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    steps = batches()
    both = [[first[0], second[0]] for first, second in zip(steps[0::2], steps[1::2])]
    expected = with_torch(make_model(), both, optimizer=SGD, clip=float("inf"))
    digests = []
    for of_tier in [{"stage": 1}, {"stage": 2}, *tiers(folder)]:
        settings = config(optimizer=SGD, zero=of_tier, gradient_clipping=0, ebb={"reduce_at": "round"})
        losses, of_masters = with_engine(make_model(), both, settings=settings, after=digest)
        assert all(abs(ours - theirs) <= 1e-6 * theirs for ours, theirs in zip(losses, expected)), (of_tier, losses, expected)
        digests.append(of_masters)
    return digests


@pytest.mark.skipif(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" and torch.cuda.device_count() < 2,
                    reason="needs two GPUs, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
def test_two_ranks_have_one_digest_at_every_stage_and_tier(two, tmp_path):
    first, second = two.run(_digests, str(tmp_path))
    assert first == second and len(set(first)) == 1, first
