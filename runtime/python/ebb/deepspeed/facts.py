"""What a DeepSpeedEngine says of its configuration."""

from typing import Any, Callable

import torch

from .config import DeepSpeedConfig


def _stated(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self._config, name)


class Facts:
    _config: DeepSpeedConfig
    optimizer: Any
    gather_16bit_weights_on_model_save: bool
    basic_optimizer: torch.optim.Optimizer

    train_batch_size, train_micro_batch_size_per_gpu = _stated("train_batch_size"), _stated("train_micro_batch_size_per_gpu")
    gradient_accumulation_steps, gradient_clipping = _stated("gradient_accumulation_steps"), _stated("gradient_clipping")
    managed_gradient_accumulation, zero_optimization_stage = _stated("managed"), _stated("zero_optimization_stage")

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    zero_optimization = lambda self: self.zero_optimization_stage() > 0
    zero_optimization_partition_gradients = lambda self: self.zero_optimization_stage() >= 2
    zero_optimization_partition_weights = lambda self: self.zero_optimization_stage() == 3
    zero_gather_16bit_weights_on_model_save = lambda self: self.gather_16bit_weights_on_model_save
    bfloat16_enabled = lambda self: self._config.dtype == torch.bfloat16
    fp16_enabled = lambda self: self._config.dtype == torch.float16

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        return self._config.dtype, self._config.dtype

    def optimizer_name(self) -> str | None:
        return type(self.basic_optimizer).__name__ if self.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        return self._config.scheduler["type"] if self._config.scheduler else None
