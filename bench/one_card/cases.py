"""The rows of bench/one_card/run.py: shapes, systems, tokens of a step, and the JSON that Ebb, ebb-plan and DeepSpeed read."""

from __future__ import annotations

import dataclasses
from typing import Any

GIB = 2**30
DEVICE_MEMORY, HOST_MEMORY = 24 * GIB, 112 * GIB  # of the GPU rows: an RTX 4090's, and most of the RAM of a small host
TINY_DEVICE_MEMORY, TINY_HOST_MEMORY = 24 * 2**20, 4 * GIB  # of a rank's pools; of each rank's RAM
ADAMW = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
COMMANDS = ("first", "second", "third")
COMMAND_SECONDS = 240  # of one command on a GPU, the start included


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    micro_batch_max: int  # sequences of a rank

    def config(self) -> dict[str, Any]:
        """As transformers' LlamaConfig and its config.json name the sizes."""
        return {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "intermediate_size": self.feed_forward, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.key_value_heads, "max_position_embeddings": self.context,
            "tie_word_embeddings": False, "use_cache": False,
        }

    def parameters(self) -> int:
        keys = self.width // self.heads * self.key_value_heads
        block = 2 * self.width**2 + 2 * self.width * keys + 3 * self.width * self.feed_forward + 2 * self.width
        return self.layers * block + 2 * self.vocabulary * self.width + self.width


SHAPES = {
    "tiny": Shape(4, 256, 4, 2, 704, 2048, 128, 2),
    "1.5B": Shape(28, 2048, 16, 8, 5632, 32000, 4096, 8),
    "3B": Shape(28, 3072, 24, 8, 8192, 32000, 4096, 4),
    "8B": Shape(32, 4096, 32, 8, 14336, 128256, 4096, 2),
}


@dataclasses.dataclass(frozen=True)
class System:
    program: str  # ebb, fsdp2, deepspeed, roundpipe
    place: str  # device: without offload; states: those in RAM; ram, nvme: parameters and states there
    small: bool = False  # states of 8 bits and split masters
    stale: bool = False  # parameters that are one step old


BASE = "Ebb, without offload"
SYSTEMS = {
    BASE: System("ebb", "device"),
    "Ebb, states in RAM": System("ebb", "states"),
    "Ebb, everything in RAM": System("ebb", "ram"),
    "Ebb, everything on NVMe": System("ebb", "nvme"),
    "Ebb, 8-bit states and split masters in RAM": System("ebb", "ram", small=True),
    "Ebb, 8-bit states and split masters on NVMe": System("ebb", "nvme", small=True),
    "FSDP2, CPUOffloadPolicy": System("fsdp2", "ram"),
    "DeepSpeed, ZeRO-3 offload": System("deepspeed", "ram"),
    "DeepSpeed, ZeRO-Infinity": System("deepspeed", "nvme"),
    "RoundPipe, exact": System("roundpipe", "ram"),
    "RoundPipe, parameters one step old": System("roundpipe", "ram", stale=True),
}


@dataclasses.dataclass(frozen=True)
class Row:
    command: str  # cpu, first, second, third
    shape_name: str
    tokens: int  # of a step of all ranks
    system_name: str
    seconds: int  # that it may take, its start included

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def system(self) -> System:
        return SYSTEMS[self.system_name]

    @property
    def device(self) -> str:
        return "cpu" if self.command == "cpu" else "cuda"

    @property
    def ranks(self) -> int:
        return 2 if self.device == "cpu" else 1

    @property
    def key(self) -> str:
        return f"{self.shape_name}, {tokens_text(self.tokens)}, {self.system_name}"

    @property
    def micro_batch(self) -> int:
        """Sequences."""
        return min(self.shape.micro_batch_max, self.tokens // (self.ranks * self.shape.context))

    @property
    def micro_batches(self) -> int:
        """Of a step of a rank."""
        return self.tokens // (self.ranks * self.micro_batch * self.shape.context)

    @property
    def capped(self) -> bool:
        """Whether the system has the cap of device memory. Without offload it shows the speed of a device that is large enough."""
        return self.system.place != "device"

    @property
    def device_memory(self) -> int:
        return DEVICE_MEMORY if self.device == "cuda" else TINY_DEVICE_MEMORY

    @property
    def host_memory(self) -> int:
        """Of a rank."""
        return HOST_MEMORY if self.device == "cuda" else TINY_HOST_MEMORY


def tokens_text(tokens: int) -> str:
    return f"{tokens // 2**10}k tokens" if tokens < 2**19 else f"{tokens / 2**20:g} M tokens"


K16, K128, HALF_MILLION = 2**14, 2**17, 2**19
TINY_TOKENS = 2**11
ROWS = [
    *(Row("cpu", "tiny", TINY_TOKENS, name, 300) for name in SYSTEMS),
    # Nine rows: the shapes at 128k tokens, and the peers beside the smaller one.
    Row("first", "1.5B", K128, BASE, 21),
    Row("first", "1.5B", K128, "Ebb, states in RAM", 21),
    Row("first", "1.5B", K128, "Ebb, everything in RAM", 21),
    Row("first", "1.5B", K128, "FSDP2, CPUOffloadPolicy", 24),
    Row("first", "1.5B", K128, "DeepSpeed, ZeRO-3 offload", 30),
    Row("first", "3B", K128, BASE, 27),
    Row("first", "3B", K128, "Ebb, states in RAM", 27),
    Row("first", "3B", K128, "Ebb, everything in RAM", 27),
    Row("first", "1.5B", K128, "Ebb, everything on NVMe", 36),
    # A large and a small batch of the smaller shape.
    Row("second", "1.5B", HALF_MILLION, BASE, 32),
    Row("second", "1.5B", HALF_MILLION, "Ebb, states in RAM", 32),
    Row("second", "1.5B", HALF_MILLION, "Ebb, everything in RAM", 32),
    Row("second", "1.5B", HALF_MILLION, "DeepSpeed, ZeRO-3 offload", 46),
    Row("second", "1.5B", K16, "Ebb, everything on NVMe", 22),
    Row("second", "1.5B", K16, "DeepSpeed, ZeRO-Infinity", 40),
    Row("second", "1.5B", K16, "Ebb, everything in RAM", 14),
    Row("second", "1.5B", K16, "DeepSpeed, ZeRO-3 offload", 16),
    # The larger shapes, and RoundPipe.
    Row("third", "3B", K128, "RoundPipe, exact", 40),
    Row("third", "3B", K128, "RoundPipe, parameters one step old", 36),
    Row("third", "3B", HALF_MILLION, BASE, 48),
    Row("third", "3B", HALF_MILLION, "Ebb, everything in RAM", 48),
    Row("third", "8B", K16, "Ebb, 8-bit states and split masters in RAM", 30),
    Row("third", "8B", K16, "Ebb, 8-bit states and split masters on NVMe", 32),
]


def settings_of(row: Row, folder: str) -> dict[str, Any]:
    """The JSON. Ebb and DeepSpeed read the same keys; "ebb" is left out for DeepSpeed."""
    system, shape = row.system, row.shape
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 10_000}
    ram, disk = {"device": "cpu", "pin_memory": row.device == "cuda"}, {"device": "nvme", "nvme_path": folder}
    if system.place == "states":
        zero |= {"offload_optimizer": ram}
    elif system.place == "ram":
        zero |= {"offload_param": ram, "offload_optimizer": ram}
    elif system.place == "nvme":
        zero |= {"offload_param": disk | {"max_in_cpu": 0}, "offload_optimizer": disk}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": row.micro_batch, "gradient_accumulation_steps": row.micro_batches, "gradient_clipping": 1.0,
        "bf16": {"enabled": True}, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": ADAMW | ({"states": "8bit"} if system.small else {})},
    }
    if system.program == "deepspeed":
        if system.place == "nvme":
            # Its buffers hold whole parameters: the largest, and as many as some blocks have. With a larger prefetch it asks for one parameter
            # twice where forward turns to backward, and fails.
            largest = max(shape.vocabulary, shape.feed_forward) * shape.width
            zero["offload_param"] |= {"buffer_size": largest, "buffer_count": 20}
            zero["stage3_prefetch_bucket_size"] = min(1_000_000, largest // 2)
        return settings
    own: dict[str, Any] = {"split_master": True} if system.small else {}
    if row.capped:
        own["device_memory"] = row.device_memory
    if system.place in ("states", "ram"):
        own["host_memory"] = row.host_memory  # on NVMe the key would fill RAM with what belongs on the disk
    return settings | ({"ebb": own} if own else {})
