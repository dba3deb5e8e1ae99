"""What a DeepSpeedEngine says of its configuration."""

from typing import Any

import torch

from .config import DeepSpeedConfig


class Facts:
    _config: DeepSpeedConfig
    optimizer: Any
    gather_16bit_weights_on_model_save: bool
    basic_optimizer: torch.optim.Optimizer

    def train_batch_size(self) -> int:
        return self._config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self._config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        return self._config.gradient_clipping

    def managed_gradient_accumulation(self) -> bool:
        return self._config.managed

    def zero_optimization_stage(self) -> int:
        return self._config.zero_optimization_stage

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.gather_16bit_weights_on_model_save

    def bfloat16_enabled(self) -> bool:
        return self._config.dtype == torch.bfloat16

    def fp16_enabled(self) -> bool:
        return self._config.dtype == torch.float16

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        return self._config.dtype, self._config.dtype

    def optimizer_name(self) -> str | None:
        return type(self.basic_optimizer).__name__ if self.optimizer is not None else None

    def scheduler_name(self) -> str | None:
        return self._config.scheduler["type"] if self._config.scheduler else None
