"""The model of torch_gpt.py at any size under FSDP2 on one GPU, with the settings of a fast training.

    python torch_gpt_cuda.py --layers 12 --heads 12 --width 768 --batch 32 [--accumulate N] [--offload] ...
    python torch_gpt_cuda.py --matrix-rate

It uses fully_shard for each block and the root, parameters in bf16 and reductions in Ebb's dtype (bf16), torch.compile
for each block and for the head with its loss, flash attention by SDPA, AdamW in one fused kernel, and clipping at 1.
Only the last micro-batch reduces. --keep-gathered: micro-batches share one gather, which saves the copies of
CPUOffloadPolicy. Prints one line of JSON; tokens_per_second is of all steps after the warm-up, between two
synchronisations.
--matrix-rate: only measures the best rate of a bf16 product of 8192^3 with random numbers. --device cpu: to try it.
"""

import argparse
import json
import os
import resource
import socket
import time
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch_gpt import Gpt, Shape


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def matrix_rate(device, size):
    """TFLOP/s of the best of 5 runs of 10 products."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(6):  # the first one warms up
        wait(device)
        begin = time.perf_counter()
        for _ in range(10):
            a @ b
        wait(device)
        rates.append(10 * 2 * size**3 / (time.perf_counter() - begin) / 1e12)
    return {"matrix_tflops": max(rates[1:]), "matrix_size": size}


def join_world_of_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    # Clipping sums on the CPU if the parameters are offloaded.
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def fill(model, device):
    """Initial values: made on the device, also for parameters that live on the host."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local()
        if local.dim() > 1:
            local.copy_(torch.randn(local.shape, device=device) * 0.02)
        else:
            local.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def prepare(args, device):
    with torch.device("meta"):
        model = Gpt(Shape(args.layers, args.heads, args.width, args.context, args.vocabulary))
    for name, block in list(model.blocks.named_children()):
        if args.recompute:
            block = checkpoint_wrapper(block)
        if args.compile:
            block = torch.compile(block, fullgraph=True)
        model.blocks.register_module(name, block)
    if args.compile:
        model.head_loss = torch.compile(model.head_loss)

    reduce = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.reduce]
    policies = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if args.offload else OffloadPolicy(),
        "reshard_after_forward": not args.keep_gathered,
    }
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    model.to_empty(device="cpu" if args.offload else device)
    with torch.no_grad():
        fill(model, device)
    return model


def batches(args, device):
    """Endless micro-batches: pieces of the text, or numbers where there is none."""
    choose = torch.Generator().manual_seed(1)
    text = None
    if args.data:
        text = torch.frombuffer(bytearray(b"".join(open(path, "rb").read() for path in args.data)), dtype=torch.uint8)
    while True:
        if text is None:
            batch = torch.randint(args.vocabulary, (args.batch, args.context + 1), generator=choose)
        else:
            starts = torch.randint(len(text) - args.context - 1, (args.batch,), generator=choose)
            batch = torch.stack([text[s : s + args.context + 1] for s in starts]).long()
        if device.type == "cuda":
            batch = batch.pin_memory().to(device, non_blocking=True)
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


class Trainer:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.model = prepare(args, device)
        self.batches = batches(args, device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    def step(self, micro_batches):
        """The loss of the last micro-batch. The device may not have computed it yet."""
        for m in range(micro_batches):
            last = m + 1 == micro_batches
            self.model.set_requires_gradient_sync(last)
            if self.args.keep_gathered:
                self.model.set_reshard_after_backward(last)
            loss = self.model(*next(self.batches))
            (loss / micro_batches).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def train(args, device):
    join_world_of_one()
    begin = time.perf_counter()
    trainer = Trainer(args, device)
    # Two micro-batches are enough to compile, and to make the buffers of accumulation.
    for _ in range(args.warm_up):
        trainer.step(min(args.accumulate, 2))
    wait(device)
    start = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(args.steps):
        loss = trainer.step(args.accumulate)
    wait(device)
    seconds = time.perf_counter() - begin
    tokens = args.batch * args.context * args.accumulate
    cuda = device.type == "cuda"
    dist.destroy_process_group()
    return {
        "tokens_per_second": tokens * args.steps / seconds,
        "tokens_per_step": tokens,
        "timed_steps": args.steps,
        "start_seconds": start,
        "loss": float(loss),
        "device_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "device_reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in {"layers": 12, "heads": 12, "width": 768, "context": 1024, "vocabulary": 50304,
                          "batch": 32, "accumulate": 1, "steps": 10, "warm-up": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--reduce", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--data", nargs="+", help="files whose bytes are the tokens; without: random tokens")
    parser.add_argument("--offload", action="store_true", help="CPUOffloadPolicy: parameters and optimizer in RAM")
    parser.add_argument("--keep-gathered", action="store_true", help="parameters stay gathered between micro-batches")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of each block")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--matrix-rate", action="store_true")
    parser.add_argument("--matrix-size", type=int, default=8192)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    torch.manual_seed(1)
    result = matrix_rate(device, args.matrix_size) if args.matrix_rate else train(args, device)
    result["torch"] = torch.__version__
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
