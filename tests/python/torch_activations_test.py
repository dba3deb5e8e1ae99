"""The bytes of torch's activations with which tests/planner compares ebb-plan (torch_activations.json), counted again. GPT-2 has no dropout of
attention, because its fused kernel on a CPU has none."""

import json
from pathlib import Path

import pytest
import torch
from training import config

import ebb

ROWS = json.loads((Path(__file__).parents[1] / "planner/torch_activations.json").read_text())
TOKENS = 1024


def rows(*keys):
    return [pytest.param(row, id=f"{row['config']['model_type']}-{row['config'].get('num_hidden_layers', 4)}") for row in ROWS if set(keys) <= set(row)]


def model_of(row, **more):
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**row["config"], max_position_embeddings=TOKENS, pad_token_id=0, **more)
    return transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation="sdpa").train()


def batch():
    ids = torch.arange(TOKENS).unsqueeze(0)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("row", rows("eager", "recomputed"))
def test_eager_torch_keeps_what_the_planner_is_compared_with(row):
    model = model_of(row)  # with a cache: without one transformers makes a mask of fake tensors
    for key in ("eager", "recomputed"):
        if key == "recomputed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        peak = ebb.count_activations(model, config(3, bf16={"enabled": True}), 1, example=batch()).peak
        assert peak / TOKENS == pytest.approx(row[key], rel=0.01)


@pytest.mark.parametrize("row", rows("compiled"))
def test_compiled_torch_saves_what_the_planner_is_compared_with(row):
    """Inductor's decompositions and its partitioner without its kernels, which save the same."""
    model, example = model_of(row, use_cache=False), batch()
    known = {tensor.untyped_storage()._cdata for tensor in [*model.parameters(), *model.buffers(), *example.values()]}
    saved = {}  # by storage, which the tensor keeps alive

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    step = torch.compile(lambda example: model(**example).loss, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(example)
    counted = sum(tensor.untyped_storage().nbytes() for storage, tensor in saved.items() if storage not in known)
    assert counted / TOKENS == pytest.approx(row["compiled"], rel=0.01)
