"""What a forward keeps for its backward, as counted from shapes, beside what autograd keeps of true tensors."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import config, gpt2, llama, token_batches

import ebb

BF16 = {"bf16": {"enabled": True}}


def truly_kept(model: nn.Module, batch: dict) -> int:
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(**batch)
    return sum(storage.nbytes() for storage in kept.values())


class Stack(nn.Module):
    def __init__(self, recompute: bool = False):
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def test_each_unit_has_what_it_saves():
    # A row: an input of 4 numbers, and 8 of tanh's output, which two operators save.
    row = 2 * (4 + 8)
    assert ebb.activations(Stack(), config(**BF16), torch.zeros(5, 4, dtype=torch.bfloat16)) == {f"blocks.{i}": 5 * row for i in range(3)}


def test_a_checkpointed_block_keeps_its_input():
    kept = ebb.activations(Stack(recompute=True), config(), torch.zeros(5, 4))
    assert sum(kept.values()) == 3 * 5 * 4 * 4


@pytest.mark.parametrize("make", [gpt2, llama])
def test_models_of_transformers_keep_what_is_counted(make):
    model = make()
    batch = token_batches(1, 1)[0][0]
    assert sum(ebb.activations(model, config(), batch).values()) == truly_kept(model, batch)


def test_a_model_on_the_meta_device_is_counted_in_the_types_that_it_is_computed_in():
    on_meta = Stack().to("meta")
    fp32 = ebb.activations(on_meta, config(), torch.zeros(2, 4))
    bf16 = ebb.activations(on_meta, config(**BF16), torch.zeros(2, 4, dtype=torch.bfloat16))
    assert sum(fp32.values()) == 2 * sum(bf16.values()) > 0
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in on_meta.parameters())
