"""What a model needs, counted without computing: the memory of its activations, and its shapes for ebb-plan."""

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import config, llama, token_batches

import ebb

ROWS, WIDTH = 64, 128
TENSOR = 4 * ROWS * WIDTH  # bytes of an activation in fp32


class Chain(nn.Module):
    def __init__(self, layers=8, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.sum()


def counted(model, settings=None, rows=ROWS):
    return ebb.count_activations(model, settings or config(3), 2, example=torch.zeros(rows, WIDTH))


def test_a_chain_keeps_the_outputs_of_its_layers():
    # Tanh keeps its output, which is also the next layer's input. The batch is not counted, and the loss is a number.
    activations = counted(Chain())
    assert activations.saved == 8 * TENSOR + 4
    # Backward adds the gradients on both sides of a layer, and those of weights and biases, which are smaller than 1 MiB.
    gradients = 8 * 4 * (WIDTH * WIDTH + WIDTH)
    assert activations.saved < activations.peak <= 8 * TENSOR + 3 * TENSOR + gradients


def test_recomputing_keeps_the_inputs_of_layers_until_backward():
    plain, recomputed = counted(Chain(8), rows=4096), counted(Chain(8, recompute=True), rows=4096)
    assert recomputed.saved <= plain.saved


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = Chain(8)

    def forward(self, x):
        return checkpoint(self.chain, x, use_reentrant=False)


def test_what_is_recomputed_counts_at_the_peak():
    whole, plain = counted(Whole(), rows=4096), counted(Chain(8), rows=4096)
    assert whole.saved < 100  # the batch is not counted
    assert 0.99 * plain.peak < whole.peak < 1.01 * plain.peak


def test_sixteen_bit_parameters_have_activations_of_half_the_size():
    half = config(3, bf16={"enabled": True})
    batch = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    assert ebb.count_activations(Chain(), half, 2, example=batch).saved == 8 * TENSOR // 2 + 4


def test_a_model_is_left_as_it_was_and_needs_no_values():
    with ebb.empty_parameters():
        empty = Chain()
    before = list(empty.parameters())
    assert counted(empty) == counted(Chain())
    assert all(one is other for one, other in zip(before, empty.parameters()))
    assert all(parameter.grad is None for parameter in before)


def test_a_model_of_transformers_keeps_twice_as_much_for_two_batches():
    batch = token_batches(1, 1)[0][0]
    twice = {name: tensor.repeat(2, 1) for name, tensor in batch.items()}
    one, two = (ebb.count_activations(llama(), config(3), 2, example=each) for each in (batch, twice))
    assert 1.8 * one.saved < two.saved < 2.05 * one.saved


def test_a_model_that_looks_at_values_is_an_error():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.weight if float(self.weight) > 0 else x

    with pytest.raises(ebb.Error, match="fake tensors"):
        counted(Looks())


def test_shapes_are_written_as_a_file_that_libraries_read(tmp_path):
    from safetensors import safe_open

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 16, 1 << 16, dtype=torch.bfloat16), nn.LayerNorm(8))
    file = tmp_path / "shapes.safetensors"
    ebb.write_shapes(model, file)
    assert file.stat().st_blocks * 512 < 1 << 20  # 8 GiB of values take no space
    with safe_open(file, "pt") as read:
        shapes = {name: (read.get_slice(name).get_dtype(), read.get_slice(name).get_shape()) for name in read.keys()}
    assert shapes == {
        "0.weight": ("BF16", [1 << 16, 1 << 16]), "0.bias": ("BF16", [1 << 16]), "1.weight": ("F32", [8]), "1.bias": ("F32", [8]),
    }
    with pytest.raises(ebb.Error, match="'weight' is torch.complex64"):
        ebb.write_shapes(nn.Linear(2, 2, dtype=torch.complex64), file)


def test_shapes_say_what_trains_and_what_bytes_stand_for(tmp_path):
    from safetensors import safe_open

    class Quantized:  # as bitsandbytes' QuantState
        shape = torch.Size([96, 64])

    model = nn.Module()
    model.base = nn.Parameter(torch.zeros(96 * 64 // 2, 1, dtype=torch.uint8), requires_grad=False)
    model.base.quant_state = Quantized()
    model.norm = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16), requires_grad=False)
    model.lora_A = nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16))
    file = tmp_path / "shapes.safetensors"
    ebb.write_shapes(model, file)
    with safe_open(file, "pt") as read:
        metadata = read.metadata()
        assert read.get_slice("base").get_dtype() == "U8"
        assert read.get_slice("lora_A").get_dtype() == "BF16"
    assert json.loads(metadata["ebb.frozen"]) == ["base", "norm"]
    assert json.loads(metadata["ebb.shapes"]) == {"base": [96, 64]}
    ebb.write_shapes(nn.Linear(2, 2), file)
    with safe_open(file, "pt") as read:
        assert read.metadata() == {"format": "pt"}
