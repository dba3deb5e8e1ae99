"""optimizer_step.cc in PyTorch: adamw.py torch|deepspeed ELEMENTS THREADS."""

import sys
import time

import torch

library, elements, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
parameter = torch.nn.Parameter(torch.ones(elements))
parameter.grad = torch.full((elements,), 0.25)
options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
if library == "torch":
    optimizer = torch.optim.AdamW([parameter], fused=True, **options)
else:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **options)
for _ in sys.stdin:
    start = time.perf_counter()
    optimizer.step()
    print(time.perf_counter() - start, float(parameter.detach()[0]), flush=True)
