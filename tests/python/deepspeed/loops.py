"""Programs in DeepSpeed's words, for the tests of this folder."""

from __future__ import annotations

import copy
from typing import Any, Callable

import torch
import training


def deepspeed():
    import ebb.deepspeed

    ebb.deepspeed.install()
    import deepspeed

    return deepspeed


def config(stage: int = 3, accumulate: int = 1, zero: dict | None = None, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulate, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})}, **more,
    }


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def begin(model: torch.nn.Module, settings: Any = None, make: Callable | None = adamw, **more: Any) -> Any:
    """The engine."""
    optimizer = make(model.parameters()) if make else None
    return deepspeed().initialize(model=model, optimizer=optimizer, config=settings or config(), **more)[0]


def mean_over_ranks(value: torch.Tensor) -> float:
    import deepspeed.comm as dist

    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(engine: Any, batches: list[list[Any]], accumulate: int = 1) -> list[float]:
    """The loss of each step, over all ranks."""
    first = engine.global_rank * accumulate
    losses = []
    for of_step in batches:
        total = torch.zeros(())
        for batch in of_step[first : first + accumulate]:
            total += engine.backward(training.squared_error(engine, batch))
            engine.step()
        losses.append(mean_over_ranks(total))
    return losses


def train_with_torch(
    model: torch.nn.Module, batches: list[list[Any]], optimizer: torch.optim.Optimizer, clip: float = 1.0, schedule: Any = None
) -> tuple[list[float], list[float]]:
    """The losses and the norms."""
    losses, norms = [], []
    for of_step in batches:
        total = 0.0
        for batch in of_step:
            loss = training.squared_error(model, batch) / len(of_step)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_([one for one in model.parameters() if one.grad is not None], clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return losses, norms


def check(ours: list[float], theirs: list[float], tolerance: float = 1e-6) -> None:
    assert len(ours) == len(theirs)
    for step, (one, other) in enumerate(zip(ours, theirs)):
        assert abs(one - other) <= tolerance * max(1.0, abs(other)), f"step {step}: {one}, torch has {other}"


def pair(make: Callable[[], torch.nn.Module] = training.mlp) -> tuple[torch.nn.Module, torch.nn.Module]:
    model = make()
    return model, copy.deepcopy(model)
