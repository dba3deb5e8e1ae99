"""One rank of one system that trains a model of transformers: module_training.py SYSTEM MODEL FOLDER [compile], its place as torchrun gives it.

SYSTEM: torch, fsdp2, deepspeed_cpu, deepspeed_nvme, ebb, ebb_cpu, ebb_nvme; those with offload read one JSON for both libraries.
ebb_nvme_all also has gradients on the disk. MODEL: gpt2, llama, "states", a GPT-2 with very small activations, or "gpu", GPT-2's 124 M
parameters on a GPU in bf16 with fp32 masters (torch: autocast). Each line of the input is a number of steps. For it, a line of the
output has each step's seconds and core seconds, the loss, the bytes that the system counts above a process with all libraries and no
model, at the peak of those steps and after them, and the engine's own table. On a GPU the bytes are those of its memory that torch and
the engine have taken. "compile": torch compiles the blocks, but not DeepSpeed's.
"""

import ctypes
import json
import os
import pathlib
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

ADAMW = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
# Vocabulary, layers, width, heads, context, batch of a rank.
SHAPES = {"gpt2": (8192, 6, 384, 6, 256, 4), "llama": (8192, 6, 384, 6, 256, 4), "states": (8192, 12, 1536, 12, 16, 1),
          "gpu": (50304, 12, 768, 12, 1024, 16)}


def make_model(kind):
    vocabulary, layers, width, heads, context, _ = SHAPES[kind]
    torch.manual_seed(1)
    if kind == "llama":
        # As many parameters as the GPT-2: three matrices of 8/3 widths instead of two of 4 widths, and a tied head.
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers, num_attention_heads=heads,
            max_position_embeddings=context, tie_word_embeddings=True, use_cache=False,
        ))
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_positions=context, n_embd=width, n_layer=layers, n_head=heads, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, use_cache=False,
    ))


def blocks_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def settings_of(system, kind, folder):
    zero = {"stage": 3}
    place = {"cpu": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": folder}}.get(system.removesuffix("_all").partition("_")[2])
    if place:
        # Buffers of DeepSpeed's for the largest parameter instead of 400 MB each, and for all parameters of some blocks.
        largest = 16_000_000 if kind == "states" else 4_000_000
        parameters = dict(place, max_in_cpu=0, buffer_size=largest, buffer_count=40) if place["device"] == "nvme" else place
        zero.update(offload_param=parameters, offload_optimizer=place)
        if system == "deepspeed_nvme":
            # By default it prefetches across the turn from forward to backward and asks for one parameter twice, which fails ("already
            # assigned swap buffer"). 1e6 elements are fewer than those of the embedding, which lies at the turn.
            zero.update(stage3_prefetch_bucket_size=1_000_000)
    settings = {"train_micro_batch_size_per_gpu": SHAPES[kind][-1], "gradient_clipping": 0, "zero_optimization": zero,
                "optimizer": {"type": "AdamW", "params": ADAMW}}
    if kind == "gpu":
        settings["bf16"] = {"enabled": True}
    own = {"offload_gradients": "nvme"} if system.endswith("_all") else {}
    if kind == "states":
        own["prefetch_depth"] = 0  # for comparisons of memory
    return settings | ({"ebb": own} if own else {})


def ebb_calls(model, settings):
    import ebb

    engine = ebb.initialize(model, settings, keep_memory=True)

    def step(ids):
        engine.backward(model(input_ids=ids, labels=ids).loss)
        engine.step()
        return engine.report().loss

    return step, lambda *tiers: sum(row.peak for row in engine.memory() if row.tier in tiers)


def deepspeed_calls(kind, settings):
    import deepspeed

    # Its engine writes fp32 parameters to a disk only for a model that was made so. For others it writes bf16 if the CPU has no fp16.
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = make_model(kind)
    engine, *_ = deepspeed.initialize(model=model, config=settings, dist_init_required=False)

    def step(ids):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, lambda *tiers: 0


def torch_calls(model, shards, on_gpu):
    if shards:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if on_gpu else MixedPrecisionPolicy()
        for block in blocks_of(model):
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids):
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu and not shards):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, lambda *tiers: 0


def counted(file, key):
    """Bytes that the operating system counts. "Pss" divides a page of several processes among them; "Rss" and "VmHWM" count it whole."""
    line = next(line for line in pathlib.Path("/proc/self", file).read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def peak():
    return counted("status", "VmHWM") - counted("smaps_rollup", "Rss") + counted("smaps_rollup", "Pss")


def main():
    system, kind, folder, *compile_blocks = sys.argv[1:]
    on_gpu = kind == "gpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, os.cpu_count() // world))
    vocabulary, *_, context, batch = SHAPES[kind]
    if system.startswith("deepspeed"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif system.startswith("ebb"):
        import ebb

        ebb.world()
    elif system == "fsdp2":
        torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    trim = ctypes.CDLL(None).malloc_trim
    if kind == "states":
        # Buffers that torch's first products take and keep belong to no engine.
        plain = make_model(kind)
        ids = torch.zeros((batch, context), dtype=torch.long)
        plain(input_ids=ids, labels=ids).loss.backward()
        del plain
        trim(0)
    idle = counted("smaps_rollup", "Pss")
    settings = settings_of(system, kind, folder)
    if system.startswith("deepspeed"):
        step, table = deepspeed_calls(kind, settings)
    else:
        model = make_model(kind).to(device)
        for block in blocks_of(model) if compile_blocks else ():
            block.compile()
        step, table = ebb_calls(model, settings) if system.startswith("ebb") else torch_calls(model, system == "fsdp2", on_gpu)
    generator = torch.Generator().manual_seed(rank)
    print("READY", flush=True)
    for line in sys.stdin:
        # Gives freed memory back to the system, and starts a new peak.
        trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        times, cores = [], []
        for _ in range(int(line)):
            ids = torch.randint(0, vocabulary, (batch, context), generator=generator).to(device)
            begin, begin_cores = time.monotonic(), time.process_time()
            loss = step(ids)
            times.append(time.monotonic() - begin)
            cores.append(time.process_time() - begin_cores)
        if on_gpu:
            highest = held = torch.cuda.max_memory_reserved() + table("device")
        else:
            highest = peak() - idle
            trim(0)
            held = counted("smaps_rollup", "Pss") - idle
        print("RESULT", json.dumps({"seconds": times, "cores": cores, "loss": loss, "peak": highest, "held": held, "table": table("device", "cpu")}), flush=True)


if __name__ == "__main__":
    main()
