#!/usr/bin/env python3
"""The memory of PyTorch's DDP and FSDP2 and of DeepSpeed for the tensors that footprint --peers trains.

    bench/footprint/peers.py --kind KIND --world N --units FILE.json [--disk FOLDER] [--steps 3]

KIND: ddp, fsdp2, or deepspeed-STAGE-PARAMETERS-STATES, such as deepspeed-3-cpu-nvme; device: not offloaded.
FILE.json: a list of units, each a list of shapes. A unit's forward uses every element of its parameters once, so that
gradients are whole, and keeps no activations. AdamW has fp32 masters, 16-bit compute if the library has it beside masters,
and clipping at 1. Ranks are processes on this machine's CPU, connected by gloo. Prints one line of JSON: "peak" and "idle",
bytes of the largest rank's resident set, in all steps and after a step of a model of 4,096 parameters.
"""

import argparse
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_model(torch, units):
    class Unit(torch.nn.Module):
        def __init__(self, shapes):
            super().__init__()
            self.tensors = torch.nn.ParameterList(torch.full(shape, 0.5) for shape in shapes)

        def forward(self, x):
            return x + sum(tensor.mean() for tensor in self.tensors)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.units = torch.nn.ModuleList(Unit(shapes) for shapes in units)

        def forward(self, x):
            for unit in self.units:
                x = unit(x)
            return x.sum()

    return Model()


def with_torch(args, torch, units):
    model = make_model(torch, units)
    if args.kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in model.units:
            fully_shard(unit, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # without temporaries

    def step():
        model(torch.zeros(1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def with_deepspeed(args, torch, units):
    import deepspeed

    stage, parameters, states = args.kind.split("-")[1:]

    def place(tier):
        return {"device": tier, "pin_memory": False} | ({"nvme_path": args.disk} if tier == "nvme" else {})

    zero = {"stage": int(stage)}
    if parameters != "device":
        zero["offload_param"] = place(parameters)
    if states != "device":
        zero["offload_optimizer"] = place(states)
    model = make_model(torch, units)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    })

    def step():
        engine.backward(engine(torch.zeros(1, dtype=torch.bfloat16)))
        engine.step()

    return step


def run_rank(args):
    import torch

    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    make = with_deepspeed if args.kind.startswith("deepspeed") else with_torch
    # The first use of the library imports modules and makes objects. They belong to the idle process.
    make(args, torch, [[[64, 64]]])()
    idle = peak_bytes()
    with open(args.units) as file:
        units = json.load(file)
    step = make(args, torch, units)
    for _ in range(args.steps):
        step()
    numbers = torch.tensor([peak_bytes(), idle], dtype=torch.int64)
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"peak": int(numbers[0]), "idle": int(numbers[1])}), flush=True)
    os._exit(0)  # DeepSpeed's threads would end the process with an error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--units", required=True)
    parser.add_argument("--disk", default=".", help="folder for state on NVMe")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return run_rank(args)
    library = "deepspeed" if args.kind.startswith("deepspeed") else "torch"
    if importlib.util.find_spec(library) is None:
        sys.exit(f"{library} is not installed for {sys.executable}")
    place = {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(args.world)}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv],
                         env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                         stdout=None if rank == 0 else subprocess.DEVNULL)
        for rank in range(args.world)
    ]
    failed = {number: status for number, status in enumerate([rank.wait() for rank in ranks]) if status != 0}
    if failed:
        sys.exit(f"{args.kind} has failed: exit status by rank {failed}")


if __name__ == "__main__":
    main()
