"""Microseconds that hooks and calls add to a scope: 24 blocks of 12 small parameters, forward and backward through ebb and in plain
torch, on one rank, in turns. The time includes the copy of gradients into the engine's memory, but not the update."""

import copy
import statistics
import time

import torch
from torch import nn

import ebb

BLOCKS, PARAMETERS, ROUNDS = 24, 12, 200


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(PARAMETERS)])

    def forward(self, x):
        for vector in self.vectors:
            x = x + vector
        return x


def seconds(model, x, loss_of):
    begin = time.perf_counter()
    loss_of(model(x).sum())
    return time.perf_counter() - begin


def main():
    torch.set_num_threads(1)
    plain = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    model = copy.deepcopy(plain)
    engine = ebb.initialize(model, {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }, units=["Block"])
    x = torch.rand(8)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(seconds(model, x, engine.backward))
        engine.step()
        engine.report()
        theirs.append(seconds(plain, x, torch.Tensor.backward))
        plain.zero_grad()
    added = [(mine - other) / (2 * BLOCKS) * 1e6 for mine, other in zip(ours[20:], theirs[20:])]
    print(f"hooks and calls: {statistics.median(added):.1f} us a scope of {PARAMETERS} parameters (bar: at most 40); a step of {2 * BLOCKS} scopes "
          f"takes {statistics.median(ours[20:]) * 1e3:.2f} ms, plain torch's {statistics.median(theirs[20:]) * 1e3:.2f}")
    engine.close()


if __name__ == "__main__":
    main()
