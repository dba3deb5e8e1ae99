"""Tensor parallelism of torch on the engine: DTensor parameters, beside plain torch over the whole batch and beside torch's own DTensors."""

import os

import pytest
import torch
import torch.distributed as dist
from cut_models import SGD, STEPS, Blocks, by_columns_and_rows, by_sequence, cut_by, error_of, far, is_like_torch, mesh_of, tiers_of, train, vectors
from ranks import on_four, on_pair
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import config, llama, of_output, token_batches, with_torch

import ebb


@pytest.mark.parametrize("tier", ["device", "cpu"])
@pytest.mark.parametrize("stage", [1, 3])
@on_four
def test_a_llama_cut_by_its_own_plan_over_two_data_ranks(stage, tier):
    mesh_of()
    is_like_torch(llama, token_batches(STEPS, 2), settings={"stage": stage, "zero": tiers_of(stage, tier)})


@pytest.mark.parametrize("stage", [1, 3])
@on_pair
def test_a_llama_cut_by_its_own_plan_over_one_data_rank(stage):
    mesh_of()
    is_like_torch(llama, token_batches(STEPS, 1), settings={"stage": stage})


def tiny(name, **more):
    import transformers

    sizes = dict(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, head_dim=8, **more,
    )
    kind = getattr(transformers, f"{name}Config")
    torch.manual_seed(1)
    return getattr(transformers, f"{name}ForCausalLM")(kind(**sizes))


MODELS = {
    "Qwen2": {"tie_word_embeddings": True}, "Qwen3": {}, "Mistral": {"sliding_window": 8}, "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", MODELS)
@on_pair
def test_models_of_transformers_with_their_own_plans(name):
    mesh_of()
    is_like_torch(lambda: tiny(name, **MODELS[name]), token_batches(STEPS, 1))


@on_four
def test_masters_norms_and_losses_are_those_of_torchs_dtensors():
    """Torch alone, with the same cut: gradients of data ranks are averaged, the norm is over all blocks, and SGD updates local tensors."""
    mesh = mesh_of()
    batches, clip = token_batches(STEPS, 2), 0.5
    model, other = llama(), llama()
    cut_by(other)
    rank, group = mesh.get_coordinate()[0], mesh["dp"].get_group()
    losses, norms = [], []
    for of_step in batches:
        loss = of_output(other, of_step[rank])
        loss.backward()
        total = loss.detach() / 2
        dist.all_reduce(total, group=group)
        square = torch.zeros((), dtype=torch.float64)
        for parameter in other.parameters():
            is_cut = isinstance(parameter, DTensor) and parameter.placements[0].is_shard()
            gradient = parameter.grad.redistribute(placements=parameter.placements).to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(gradient, group=group)
            gradient /= 2
            own = gradient.double().square().sum()
            if is_cut:
                dist.all_reduce(own, group=mesh["tp"].get_group())
            square += own
            parameter.reduced = gradient
        norm = square.sqrt()
        with torch.no_grad():
            for parameter in other.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local -= 0.1 * parameter.reduced * min(1.0, clip / norm.item())
                parameter.grad = None
        losses.append(total.item()), norms.append(norm.item())
    ours, our_norms, engine = train(model, batches, config(3, SGD, gradient_clipping=clip, tensor_parallel={"autotp_size": 2}))
    for one, another in zip(ours + our_norms, losses + norms):
        assert abs(one - another) <= 1e-6 * abs(another)
    for name, value in other.named_parameters():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert far(engine.gather(name, master=True), whole.detach()) <= 1e-6, name
    engine.close()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("cut", [by_columns_and_rows, by_sequence])
@on_four
def test_a_module_that_torch_has_cut(cut, stage):
    mesh = mesh_of()["tp"]
    is_like_torch(Blocks, vectors(STEPS, 2), lambda model: cut(model, mesh), {"stage": stage}, error_of)


@on_pair
def test_blocks_of_unequal_sizes():
    mesh = mesh_of()["tp"]

    def cut(model):
        for block in model.blocks:  # DTensors between them, because torch takes local tensors for equal ones
            parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})

    is_like_torch(lambda: Blocks(hidden=25), vectors(STEPS, 1), cut, None, error_of)


@on_pair
def test_two_projections_in_one_weight():
    """_StridedShard: each rank has its rows of both halves."""
    from torch.distributed.tensor.placement_types import _StridedShard

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.both, self.down = nn.Linear(16, 24, bias=False), nn.Linear(12, 1, bias=False)

        def forward(self, x):
            both = self.both(x)
            if isinstance(both, DTensor):
                both = both.to_local()
            gate, up = both.chunk(2, -1)
            return self.down(torch.sigmoid(gate) * up)

    class Cut(nn.Module):
        pass

    def cut(model):
        mesh = mesh_of()["tp"]
        rank = mesh.get_local_rank()
        rows = model.both.weight.detach().unflatten(0, (2, 2, 6))[:, rank].flatten(0, 1)
        weight = DTensor.from_local(rows, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=torch.Size((24, 16)), stride=(16, 1))
        model.both.weight = nn.Parameter(weight)
        parallelize_module(model, mesh, {"down": RowwiseParallel()})
        own = model.both

        def local_product(x):
            return nn.functional.linear(x, own.weight.to_local())

        own.forward = local_product

    is_like_torch(Fused, vectors(STEPS, 1), cut, None, error_of)


@on_four
def test_the_batch_counts_data_ranks():
    mesh = mesh_of()["tp"]
    model = Blocks()
    by_columns_and_rows(model, mesh)
    settings = config(3, SGD, train_batch_size=8, gradient_accumulation_steps=2)
    with ebb.initialize(model, settings) as engine:
        assert (engine.data_ranks, engine.tensor_ranks) == (2, 2)
        assert (engine.data_rank, engine.tensor_rank) == divmod(engine.world.rank, 2)
        assert engine.config["train_batch_size"] == 8 and engine.config["ebb"]["mesh"]["tensor"] == 2


@on_four
def test_the_trainer_gives_tensor_ranks_the_same_samples(folder):
    from ebb.integrations.transformers import Trainer
    from transformers import TrainingArguments

    mesh_of()
    os.environ["ACCELERATE_USE_CPU"] = "1"
    data = [{"input_ids": batch["input_ids"][row], "labels": batch["labels"][row]} for batches in token_batches(6, 2) for batch in batches for row in (0, 1)]
    seen = []

    class Seeing(Trainer):
        def training_step(self, model, inputs, *arguments, **keywords):
            seen.append(inputs["input_ids"].tolist())
            return super().training_step(model, inputs, *arguments, **keywords)

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=4, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd",
        weight_decay=0.0, max_grad_norm=0.5, report_to=[], save_strategy="no", use_cpu=True, logging_steps=1, disable_tqdm=True, seed=3,
    )
    settings = config(3, SGD, gradient_clipping=0.5, train_batch_size=4)
    model, plain = llama(), llama()
    trainer = Seeing(model, arguments, train_dataset=data, eval_dataset=data[:5], ebb_config=settings, tp_size=2)
    trainer.train()
    assert (trainer.engine.data_ranks, trainer.engine.tensor_ranks) == (2, 2)
    everywhere = [None] * 4
    dist.all_gather_object(everywhere, seen)
    assert everywhere[0] == everywhere[1] and everywhere[2] == everywhere[3] and everywhere[0] != everywhere[2]

    batches = [[{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in step] for step in zip(everywhere[0], everywhere[2])]
    expected = with_torch(plain, batches, optimizer=SGD, clip=0.5)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert all(abs(one - other) <= 1e-4 for one, other in zip(logged, expected, strict=True)), (logged, expected)  # the Trainer rounds
    for name, value in plain.named_parameters():
        assert far(trainer.engine.gather(name), value.detach()) <= 1e-6, name

    predicted = trainer.predict(data[:5])
    assert predicted.predictions.shape[0] == 5  # each sample once
    with torch.no_grad():
        logits = plain(input_ids=torch.stack([one["input_ids"] for one in data[:5]])).logits
    assert (torch.tensor(predicted.predictions) - logits).abs().max() < 1e-4
    trainer.engine.close()
