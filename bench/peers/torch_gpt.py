"""The model of examples/gpt in PyTorch, trained by a plain loop, DDP, FSDP2, or DTensor's tensor parallelism.

    python torch_gpt.py {plain,ddp,fsdp2,tensor} --batch 4 --steps 12 [--dtype fp32|bf16]

--batch is global. plain is one process on all cores; the others are two processes over gloo with half of
the cores each, which in tensor take the same samples. Prints one line of JSON: tokens per second over all ranks without the first two
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
        self.of_head = width // shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x))
        width = qkv.shape[2] // 3  # of this rank's heads
        q, k, v = (t.view(batch, tokens, -1, self.of_head).transpose(1, 2) for t in qkv.split(width, dim=2))
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


class TensorParallelGpt(nn.Module):
    """Megatron's cuts by torch.distributed.tensor: heads, hidden columns, and rows of the table; loss_parallel for the loss.

    A rank's rows of the fused qkv are its own q, k and v, which are equal to any others, because they are drawn at random.
    """

    def __init__(self, model, mesh):
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

        super().__init__()
        self.model, self.loss_parallel = model, loss_parallel
        self.whole = lambda x: DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        parallelize_module(model.tokens, mesh, RowwiseParallel(input_layouts=Replicate()))
        for block in model.blocks:
            parallelize_module(block, mesh, {"qkv": ColwiseParallel(), "projection": RowwiseParallel(),
                                             "up": ColwiseParallel(), "down": RowwiseParallel()})
        model.head_loss = self.head_loss

    def head_loss(self, x, norm_weight, norm_bias, weight, targets):
        normal = self.whole(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias))
        logits = F.linear(normal, weight).flatten(0, 1)
        return F.cross_entropy(logits, self.whole(targets.view(-1)))

    def forward(self, ids, targets):
        return self.model(ids, targets)


def clip(parameters, most):
    """clip_grad_norm_ takes either DTensors or plain tensors. What is whole counts once."""
    grads = [(p, p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad) for p in parameters]
    cut = sum(g.square().sum() for p, g in grads if any(x.is_shard() for x in getattr(p, "placements", ())))
    whole = sum(g.square().sum() for p, g in grads if not any(x.is_shard() for x in getattr(p, "placements", ())))
    dist.all_reduce(cut)
    factor = (most / ((cut + whole).sqrt() + 1e-6)).clamp(max=1)
    torch._foreach_mul_([g for _, g in grads], factor)


def optimizer_of(mode, model):
    """A group holds DTensors or plain tensors."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if hasattr(p, "placements") == cut] for cut in (False, True)]
    return torch.optim.AdamW([{"params": group} for group in groups if group], lr=6e-4, betas=(0.9, 0.95),
                             weight_decay=0.01, fused=mode not in ("fsdp2", "tensor"))


def prepare(mode, dtype):
    torch.manual_seed(1)
    model = Gpt()
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if mode == "tensor":
        from torch.distributed.device_mesh import init_device_mesh

        return TensorParallelGpt(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
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
    tensor = args.mode == "tensor"
    optimizer = optimizer_of(args.mode, model)
    with open(args.data, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    choose = torch.Generator().manual_seed(0 if tensor else rank)
    of_rank = args.batch if tensor else args.batch // world
    cast = args.dtype == "bf16" and args.mode != "fsdp2"
    seconds = []
    for _ in range(args.steps):
        begin = time.perf_counter()
        starts = torch.randint(len(text) - CONTEXT - 1, (of_rank,), generator=choose)
        batch = torch.stack([text[s : s + CONTEXT + 1] for s in starts]).long()
        with model.loss_parallel() if tensor else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext():
                loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
            loss.backward()
        if tensor:
            clip(model.parameters(), 1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        warm = seconds[2:]
        result = {
            "tokens_per_second": args.batch * CONTEXT * len(warm) / sum(warm),
            "loss": float(loss.full_tensor() if tensor else loss),
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
    parser.add_argument("mode", choices=["plain", "ddp", "fsdp2", "tensor"])
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
