"""What each system makes of the same transformers Llama: an object whose step() trains with the micro-batches of a step and returns the loss.

All compute in bf16, keep fp32 masters, recompute each block in backward, and clip the norm of the whole step at 1. DeepSpeed's initial
values are of another draw: its engine makes the model, because it writes other models to a disk in the wrong type."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import torch
from cases import ADAMW
from transformers import LlamaConfig, LlamaForCausalLM

Batches = list[torch.Tensor]


class NotHere(Exception):
    """Why a system cannot train on this machine."""


class Trained(NamedTuple):
    step: Callable[[Batches], float]
    counts: Callable[[], dict[str, int]] = dict  # Ebb's own tables


class Values(Mapping[str, torch.Tensor]):
    """Initial values by the names of state_dict(), made when they are asked for: normal numbers that repeat, because a draw of billions takes
    minutes of one core."""

    def __init__(self, model: torch.nn.Module):
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._drawn = 0.02 * torch.randn(2**20 + 1, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        count = shape.numel()
        times = -(-count // len(self._drawn))
        return self._drawn.repeat(times)[:count].view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def make_model(job: dict[str, Any]) -> LlamaForCausalLM:
    """Attention of SDPA; every block recomputes itself in backward."""
    model = LlamaForCausalLM(LlamaConfig(**job["model"], attn_implementation="sdpa"))
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # the name since transformers 5.24
    enable({"use_reentrant": False})
    return model.train()


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def with_ebb(job: dict[str, Any], device: torch.device) -> Trained:
    import ebb

    with ebb.empty_parameters():
        model = make_model(job)
    engine = ebb.initialize(model, job["settings"], values=Values(model), device=str(device), keep_memory=True)
    pools = sum(row.predicted for row in engine.memory() if row.tier == "device")
    if job["capped"] and device.type == "cuda":
        limit_torch(job["device_memory"] - pools)

    def step(batches: Batches) -> float:
        for at, ids in enumerate(batches):
            engine.backward(loss_of(model, ids))
            engine.step(now=at + 1 == len(batches))
        return engine.report().loss

    def counts() -> dict[str, int]:
        found = {f"{tier}_pools": sum(row.peak for row in engine.memory() if row.tier == tier) for tier in ("device", "cpu", "nvme")}
        for tier, words in (("cpu", ("pcie_up", "pcie_down")), ("nvme", ("disk_read", "disk_written"))):
            for word, direction in zip(words, ("read", "write")):
                rows = [row for row in engine.traffic() if (row.tier, row.direction) == (tier, direction)]
                found[word], found[f"{word}_planned"] = sum(row.bytes for row in rows), sum(row.predicted for row in rows)
        return found

    return Trained(step, counts)


def with_fsdp2(job: dict[str, Any], device: torch.device) -> Trained:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    on_gpu = device.type == "cuda"
    # The norm of gradients in RAM is summed by gloo.
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    with torch.device("meta"):
        model = make_model(job)
    values = Values(model)
    shards = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
    }
    for block in model.model.layers:
        fully_shard(block, **shards)
    fully_shard(model, **shards)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(values[name].chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()])
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)  # to_empty() has emptied its buffer
    if job["capped"] and on_gpu:
        limit_torch(job["device_memory"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(batches: Batches) -> float:
        total = 0.0
        for ids in batches:
            loss = loss_of(model, ids) / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return Trained(step)


def with_deepspeed(job: dict[str, Any], device: torch.device) -> Trained:
    import deepspeed

    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    if job["capped"] and device.type == "cuda":
        limit_torch(job["device_memory"])
    with deepspeed.zero.Init(config_dict_or_path=job["settings"]):
        model = make_model(job)
    engine, *_ = deepspeed.initialize(model=model, config=job["settings"], dist_init_required=False)

    def step(batches: Batches) -> float:
        total = 0.0
        for at, ids in enumerate(batches):
            engine.set_gradient_accumulation_boundary(at + 1 == len(batches))
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(batches)
        return total

    return Trained(step)


def with_roundpipe(job: dict[str, Any], device: torch.device) -> Trained:
    version = importlib.metadata.version("roundpipe")
    try:
        import roundpipe
    except ValueError as error:
        # It reads the least memory of all GPUs when it is imported.
        raise NotHere(f"version {version} is installed, and its import needs a GPU ({type(error).__name__}: {error})") from error
    if job["capped"]:
        limit_torch(job["device_memory"])
    with torch.device("meta"):
        model = make_model(job)
    model.gradient_checkpointing_disable()  # it recomputes by itself
    values = Values(model)
    model.to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    # Its preset calls transformers' function by arguments that newer versions do not take. Without a mask SDPA's own is causal.
    importlib.import_module("roundpipe.models.llama").create_causal_mask = lambda **_: None
    config = roundpipe.RoundPipeRunConfig(num_microbatch=job["micro_batches"])
    piped = roundpipe.wrap_model_to_roundpipe(model, optim_dtype=torch.float32, use_sequential_preset=True, model_run_config=config)
    optimizer = roundpipe.optim.Adam(piped.optim_parameters(), decoupled_weight_decay=True, **ADAMW)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(piped.optim_parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def step(batches: Batches) -> float:
        ids = torch.cat(batches).cpu()
        loss = piped.forward_backward(
            input_kwargs={"input_ids": ids, "labels": ids, "return_logits": False}, loss_fn=lambda outputs, _: outputs.loss / len(batches),
            run_config=roundpipe.RoundPipeRunConfig(num_microbatch=len(batches)),
        )
        piped.step(update, is_async=job["stale"])
        return float(loss)

    return Trained(step)


def limit_torch(left: int) -> None:
    """The bytes of the device that torch may take."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, left / total)))


MAKERS = {"ebb": with_ebb, "fsdp2": with_fsdp2, "deepspeed": with_deepspeed, "roundpipe": with_roundpipe}
