"""What the programs of this folder share, with tiny.py: a tiny model, its tokenizer, batches, and the numbers that they say."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from typing import Any

import torch
from tiny import CHAT, LLAMA, SPECIAL, STEPS, case, config, sentences, words

torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", "0"))


def meet() -> dict[str, Any]:
    """Connects the ranks. Without a GPU accelerate counts one process, unless the backend is named. Returns what TrainingArguments need for it."""
    from accelerate import PartialState

    if "WITHOUT_DEEPSPEED" in os.environ:
        PartialState(cpu=True)
        return {"use_cpu": True}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return {"deepspeed": config(), "accelerator_config": {"use_configured_state": True}}


def llama_config(**more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**LLAMA, **more)


def tiny_llama() -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(llama_config())


def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=words(), **SPECIAL)
    fast.chat_template = CHAT
    return fast


def batch_of(number: int) -> torch.Tensor:
    return torch.randint(4, 128, (2, 32), generator=torch.Generator().manual_seed(1000 * number + RANK))


class Watch:
    """Losses and norms of steps, and the evaluations."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluations: list[float] = []
        self.written: list[str] = []  # by the model in each step, on this rank
        self.ends = [time.perf_counter()]

    def step(self, loss: float | torch.Tensor, norm: Any) -> None:
        self.losses.append(mean_over_ranks(loss))
        if norm is not None:
            self.norms.append(float(norm))
        self.ends.append(time.perf_counter())

    def evaluation(self, loss: float | torch.Tensor) -> None:
        self.evaluations.append(mean_over_ranks(loss))

    def text(self, completions: list[str]) -> None:
        self.written.append(hashlib.sha256("\0".join(completions).encode()).hexdigest()[:16])

    def follow(self, trainer: Any) -> None:
        """What a Trainer of transformers has logged."""
        for row in trainer.state.log_history:
            if "loss" in row:
                self.losses.append(row["loss"])
                self.norms.append(float(row.get("grad_norm") or -1.0))
            if "eval_loss" in row:
                self.evaluations.append(row["eval_loss"])

    def say(self) -> None:
        times = [end - begin for begin, end in zip(self.ends, self.ends[1:])]
        if RANK == 0:
            print("RESULT " + json.dumps({
                "losses": self.losses, "norms": self.norms, "evaluations": self.evaluations, "seconds": statistics.median(times[2:]) if times[2:] else 0.0,
                "written": self.written,
            }), flush=True)


class StepTimes:
    """A callback of transformers' Trainer that notes when steps end."""

    def __new__(cls, watch: Watch) -> Any:
        from transformers import TrainerCallback

        class Noting(TrainerCallback):
            def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
                watch.ends.append(time.perf_counter())

        return Noting()


def mean_over_ranks(value: float | torch.Tensor) -> float:
    total = torch.as_tensor(value).detach().float().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
        total /= torch.distributed.get_world_size()
    return total.item()
