#!/usr/bin/env python3
"""Tokens/s of a transformers model that trains through ebb, beside FSDP2 and plain torch, in rounds in turn.

    bench/python_against_fsdp2.py [--rounds 8] [--steps 12] [--model gpt2|llama] [--nvme FOLDER] [--output FILE.csv]

Two ranks on the CPU with gloo for FSDP2 (stage 3, each block a unit, fp32, AdamW, no clipping), one thread of torch each; "world 1" is one rank
with two threads beside torch with a fused AdamW. With --nvme ebb runs once more with parameters, masters and states there. A round runs each
system once, in processes of its own; figures are medians of a round's steps after the first three. For a machine on which nobody else computes."""

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import time

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 6, 384, 6, 256, 4, 8192
WARM_UP = 3


def make_model(kind):
    import torch
    import transformers

    torch.manual_seed(1)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
            bos_token_id=1, eos_token_id=2, use_cache=False,
        ))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT, use_cache=False,
    ))


def blocks_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def with_ebb(model, disk):
    import ebb

    zero = {"stage": 3}
    if disk:
        place = {"device": "nvme", "nvme_path": disk}
        zero.update(offload_param=dict(place, max_in_cpu=0), offload_optimizer=place)
    engine = ebb.initialize(model, {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    })

    def step(ids):
        engine.backward(model(input_ids=ids, labels=ids).loss)
        engine.step()

    return step, engine.report


def with_torch(model, shards):
    import torch

    if shards:
        import torch.distributed
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group("gloo")
        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not shards)

    def step(ids):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def run_system(system, kind, steps, disk):
    """One rank: prints what it has measured."""
    import torch

    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1 if world > 1 else 2)
    model = make_model(kind)
    step, wait = with_ebb(model, disk if system == "ebb_nvme" else None) if system.startswith("ebb") else with_torch(model, system == "fsdp2")
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    times, cores = [], []
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT), generator=generator)
        begin, begin_cores = time.monotonic(), time.process_time()
        step(ids)
        wait()
        times.append(time.monotonic() - begin)
        cores.append(time.process_time() - begin_cores)
    if os.environ.get("RANK", "0") == "0":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print("RESULT", json.dumps({
            "ms": 1e3 * statistics.median(times[WARM_UP:]), "core_ms": 1e3 * statistics.median(cores[WARM_UP:]), "peak_mib": peak / 1024,
        }), flush=True)
    if system == "fsdp2":
        torch.distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--nvme", default=None)
    parser.add_argument("--output", default=None)
    parser.add_argument("--system", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.system:
        return run_system(options.system, options.model, options.steps, options.nvme)

    systems = {"fsdp2": 2, "ebb": 2, "torch_world_1": 1, "ebb_world_1": 1}
    if options.nvme:
        systems["ebb_nvme"] = 2
    rows = []
    for number in range(options.rounds):
        for system, ranks in systems.items():
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
            command += [__file__, "--system", system, "--model", options.model, "--steps", str(options.steps)]
            command += ["--nvme", options.nvme] if options.nvme else []
            environment = dict(os.environ, OMP_NUM_THREADS="1" if ranks > 1 else "2", EBB_LOG_LEVEL="warn")
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).removeprefix("RESULT"))
            rows.append({"round": number, "model": options.model, "system": system, "ranks": ranks, **result})
            print(f"round {number} {system:14} {result['ms']:8.1f} ms a step, {ranks * BATCH * CONTEXT / result['ms'] * 1e3:8.0f} tokens/s, "
                  f"{result['core_ms']:8.1f} ms of cores, peak {result['peak_mib']:.0f} MiB")
    times = {system: statistics.median(row["ms"] for row in rows if row["system"] == system) for system in systems}
    print(f"ebb over FSDP2, tokens/s: {times['fsdp2'] / times['ebb']:.2f} (bar 1.30)")
    print(f"world 1, time over torch with fused AdamW: {times['ebb_world_1'] / times['torch_world_1']:.3f} (bar 1.02)")
    if options.nvme:
        print(f"all state on NVMe, speed over the device: {times['ebb'] / times['ebb_nvme']:.2f} (bar 0.95)")
    if options.output:
        with open(options.output, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
