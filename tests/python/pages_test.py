"""Each block of Python in README.md and docs/python.md trains, with models and data of this file."""

import os
import pathlib
import re

import pytest
import torch
from cut_models import Blocks, mesh_of, vectors
from ranks import on_one, on_pair
from torch import nn

import ebb

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}'


def blocks(of_tensor_ranks=False):
    for page in ("README.md", "docs/python.md"):
        text = (ROOT / page).read_text()
        for found in re.finditer(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text[: found.start()].count("\n") + 1
            if ("init_device_mesh" in found[1]) == of_tensor_ranks:
                yield pytest.param(found[1], id=f"{page}:{line}")


class MyModel(nn.Module):
    def __init__(self, outputs=3):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))

    def forward(self, x):
        return self.layers(x)


def _names(code):
    """What a page takes for granted."""
    import transformers

    names = {
        "torch": torch, "ebb": ebb, "transformers": transformers, "MyModel": MyModel, "model": MyModel(), "config": "ds_config.json",
        "loader": [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(2)], "chosen": torch.randn(4, 8),
        "rejected": torch.randn(4, 8), "path": "llama",
    }
    if "Trainer(" in code:
        from training import llama, token_batches

        names["model"] = llama()
        names["data"] = [{name: value[0] for name, value in batch.items()} for (batch,) in token_batches(8, 1, batch=1)]
        names["TrainingArguments"] = lambda folder, max_steps: transformers.TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
    if "path)" in code:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)).save_pretrained("llama")
    return names


@pytest.mark.parametrize("code", list(blocks()))
@on_one
def test_a_block_of_a_page_runs(code, folder):
    os.chdir(folder)
    pathlib.Path("ds_config.json").write_text(CONFIG)
    names = _names(code)
    exec(compile(code, "the page", "exec"), names)
    engine = names["trainer"].engine if "trainer" in names else names["engine"]
    engine.close()


@pytest.mark.parametrize("code", list(blocks(of_tensor_ranks=True)))
@on_pair
def test_a_block_of_a_page_runs_on_tensor_ranks(code):
    mesh_of()
    names = {
        "ebb": ebb, "nn": nn, "device": "cpu", "dp": 1, "tp": 2, "model": Blocks(), "config": CONFIG,
        "batch_of": lambda rank, ranks: vectors(1, ranks)[0][rank],
    }
    exec(compile(code, "the page", "exec"), names)
    assert names["engine"].tensor_ranks == 2
    names["engine"].close()
