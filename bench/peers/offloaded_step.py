"""ebb::bench's offloaded_step.cc in DeepSpeed: offloaded_step.py STAGE DTYPE UNITS ELEMENTS_OF_A_UNIT THREADS.

A real engine (deepspeed.initialize, offload_optimizer to the CPU, DeepSpeedCPUAdam), for each line of the input one
step, and a line with the seconds of backward, those of engine.step(), those of the norms that backward took, and the
first parameter. A layer's backward hands out a constant gradient that was there before, so what backward takes is
DeepSpeed's: gradients reduced, brought to their fp32 homes, norms taken.
"""

import os
import socket
import sys
import time

import torch

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
import deepspeed

# Collectives between ranks of a host: one rank needs none, and they would have to be built first.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

stage, dtype, units, elements, threads = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(threads)
torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


class Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gradient):
        ctx.gradient = gradient
        return x + 0

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.gradient, None


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(elements))

    def forward(self, x):
        return Touch.apply(x, self.weight, gradient)


gradient = torch.full((elements,), 2.0**-10, dtype=torch_dtype)
model = torch.nn.Sequential(*(Layer() for _ in range(units)))
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    dtype: {"enabled": True},
}
engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
seconds_of_norms = 0.0
take_norm_name = "_constant_buffered_norm2" if stage == 3 else "set_norm_for_param_grad_in_gpu"
take_norm = getattr(optimizer, take_norm_name)


def timed_norm(*args):
    global seconds_of_norms
    start = time.perf_counter()
    norm = take_norm(*args)
    seconds_of_norms += time.perf_counter() - start
    return norm


setattr(optimizer, take_norm_name, timed_norm)
x = torch.zeros(1, dtype=torch_dtype, requires_grad=True)
for _ in sys.stdin:
    seconds_of_norms = 0.0
    loss = engine(x).sum()
    start = time.perf_counter()
    engine.backward(loss)
    middle = time.perf_counter()
    engine.step()
    end = time.perf_counter()
    masters = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    print(middle - start, end - middle, seconds_of_norms, float(masters[0].detach()[0]), flush=True)
