"""What needs no torch: the case of the run, the JSON, and a tiny model's sizes, tokens and sentences."""

from __future__ import annotations

import json
import os
from typing import Any

STEPS = 6
CHAT = "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '.' }}{% endfor %}"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32",
}


def case() -> dict[str, Any]:
    return json.loads(os.environ["CASE"])


def config(**more: Any) -> dict[str, Any]:
    """The JSON for accelerate and transformers, which fill in "auto"."""
    options = case()
    made = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": options["stage"], "stage3_gather_16bit_weights_on_model_save": options["stage"] == 3},
        "bf16": {"enabled": options.get("dtype") == "bf16"}, "fp16": {"enabled": options.get("dtype") == "fp16"}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, **more, **options.get("json", {}),
    }
    return made


def words() -> Any:
    """A token for each printable character, as a Tokenizer of the package tokenizers."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    kinds = [*SPECIAL.values(), *map(chr, range(32, 127))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(kinds)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return made


def sentences(count: int, kind: str = "text") -> list[str]:
    return [f"{kind} {n}: the number after {n} is {n + 1}, and {'so on ' * (n % 3)}it grows" for n in range(count)]
