"""The model of examples/gpt in PyTorch, trained by a plain loop, DDP, or FSDP2.

    python torch_gpt.py {plain,ddp,fsdp2} --batch 4 --steps 12 [--dtype fp32|bf16]

--batch is global. plain is one process on all cores; ddp and fsdp2 are two processes over gloo with
half of the cores each. Prints one line of JSON: tokens per second over all ranks without the first two
steps, the last loss, and rank 0's peak resident set, in total and above the bare import of torch.
"""

import argparse
import contextlib
import json
import os
import resource
import socket
import time
import typing
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn as nn
import torch.nn.functional as F

CONTEXT = 256


class Shape(typing.NamedTuple):
    layers: int = 6
    heads: int = 6
    width: int = 384
    context: int = CONTEXT
    vocabulary: int = 256


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def head_loss(x, norm_weight, norm_bias, weight, targets):
    logits = F.linear(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias), weight)
    return F.cross_entropy(logits.view(-1, weight.shape[0]).float(), targets.view(-1))


class Gpt(nn.Module):
    def __init__(self, shape=Shape()):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head_loss = head_loss
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head_loss(x, self.norm.weight, self.norm.bias, self.tokens.weight, targets)


def prepare(mode, dtype):
    torch.manual_seed(1)
    model = Gpt()
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if mode == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if dtype == "bf16" else MixedPrecisionPolicy()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def train(rank, world, port, args, imported):
    torch.set_num_threads(max(1, (len(os.sched_getaffinity(0))) // world))
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    model = prepare(args.mode, args.dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=args.mode != "fsdp2"
    )
    with open(args.data, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    choose = torch.Generator().manual_seed(rank)
    cast = args.dtype == "bf16" and args.mode != "fsdp2"
    seconds = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        starts = torch.randint(len(text) - CONTEXT - 1, (args.batch // world,), generator=choose)
        batch = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
        with torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext():
            loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        warm = seconds[2:]
        result = {
            "tokens_per_second": args.batch * CONTEXT * len(warm) / sum(warm),
            "loss": float(loss),
            "peak_mib": peak_mib(),
            "peak_mib_above_import": peak_mib() - imported,
        }
        print(json.dumps(result), flush=True)
    if world > 1:
        dist.destroy_process_group()


def in_child(rank, world, port, args):
    train(rank, world, port, args, peak_mib())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["plain", "ddp", "fsdp2"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--data", default="/usr/share/common-licenses/GPL-3")
    args = parser.parse_args()
    if args.mode == "plain":
        return train(0, 1, 0, args, peak_mib())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(in_child, (2, port, args), nprocs=2)


if __name__ == "__main__":
    main()
