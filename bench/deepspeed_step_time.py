#!/usr/bin/env python3
"""How much longer a step takes through DeepSpeed's names than through `import ebb`: both engines in one process, in turns.

    bench/deepspeed_step_time.py [--layers 12] [--width 256] [--batch 8] [--tokens 1] [--stage 3] [--accumulate 1] [--rounds 60] [--schedule]

The model is a chain of residual blocks (width, 4 x width, width); AdamW, clipping at 1.0, fp32. A round is 5 steps of each, in an order that changes. Printed
are the median step of each and the median of the rounds' ratios. Under torchrun every rank does the same, and rank 0 prints. Needs
torch, and EBB_LIBRARY and PYTHONPATH as in docs/python.md."""

import argparse
import statistics
import time

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("width", 256), ("batch", 8), ("tokens", 1), ("stage", 3), ("accumulate", 1), ("rounds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--schedule", action="store_true")
    options = parser.parse_args()
    import ebb
    import ebb.deepspeed

    ebb.deepspeed.install()
    import deepspeed

    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": options.batch, "gradient_accumulation_steps": options.accumulate, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": options.stage, "stage3_param_persistence_threshold": 0},
    }
    if options.schedule:
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 100}}

    def model():
        torch.manual_seed(1)
        return nn.Sequential(*[Block(options.width) for _ in range(options.layers)])

    deepspeed.init_distributed()
    plain = model()
    engine = ebb.initialize(plain, config)
    named = deepspeed.initialize(model=(other := model()), model_parameters=other.parameters(), config=config)[0]
    x = torch.randn(options.batch, options.tokens, options.width)

    def step_of_ebb():
        for _ in range(options.accumulate):
            engine.backward(plain(x).square().mean())
            engine.step()

    def step_of_names():
        for _ in range(options.accumulate):
            named.backward(named(x).square().mean())
            named.step()

    turns = [step_of_ebb, step_of_names]
    for step in turns * 4:
        step()
    times = {step: [] for step in turns}
    ratios = []
    for number in range(options.rounds):
        of_round = {}
        for step in turns if number % 2 else reversed(turns):
            of_round[step] = []
            for _ in range(5):
                begin = time.perf_counter()
                step()
                of_round[step].append(time.perf_counter() - begin)
            times[step] += of_round[step]
        ratios.append(statistics.median(of_round[step_of_names]) / statistics.median(of_round[step_of_ebb]))
    if ebb.world().rank == 0:
        ours, names = (statistics.median(times[step]) * 1e3 for step in turns)
        print(f"import ebb {ours:.2f} ms, deepspeed's names {names:.2f} ms, ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
