"""Tensor parallelism of torch on the engine: DTensor parameters, beside plain torch over the whole batch and beside torch's own DTensors."""

import contextlib
import copy
import os
import random
import selectors
import signal
import socket

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, _on, on_four, on_pair, staying
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, PrepareModuleOutput, RowwiseParallel, SequenceParallel, parallelize_module,
)
from training import ADAMW, config, llama, of_output, token_batches, with_torch

import ebb
from ebb._blocks import Block as Block_
from ebb._blocks import local_of
from ebb._tensor_ranks import _cut

SGD = {"type": "SGD", "params": {"lr": 0.1}}
STEPS = 4
TIERS = {"device": {}, "cpu": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}


def mesh_of(tensor=2):
    world = ebb.world()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (world.size // tensor, tensor), mesh_dim_names=("dp", "tp"))


def cut_by(model):
    """A transformers model, by its own plan."""
    _cut(model, 2, "autotp_size", ebb.world())


def all_equal(value):
    """Whether each rank has this value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(one == values[0] for one in values)


def tiers_of(stage, tier):
    return TIERS[tier] if stage == 3 else {name: value for name, value in TIERS[tier].items() if name == "offload_optimizer"}


def far(one, other):
    """The difference in parts of the value."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def train(model, batches, settings, loss_of=of_output, **options):
    """`batches`[step][data rank]. Losses and norms of the report, the engine."""
    engine = ebb.initialize(model, settings, **options)
    losses, norms = [], []
    for of_step in batches:
        engine.backward(loss_of(model, of_step[engine.data_rank]))
        engine.step()
        report = engine.report()
        losses.append(report.loss), norms.append(report.gradient_norm)
    assert all_equal((losses, norms))
    return losses, norms, engine


def is_like_torch(make, batches, cut=None, settings=None, loss_of=of_output, tolerance=1e-6, clip=0.5, optimizer=SGD, **options):
    """`make` makes the whole model, `cut` cuts it; None: the configuration has it cut."""
    settings = {"optimizer": optimizer, "gradient_clipping": clip, **(settings or {})}
    settings = config(settings.pop("stage", 3), settings.pop("optimizer"), **settings)
    plain, model = make(), make()
    expected = with_torch(plain, batches, loss_of, optimizer, clip)
    if cut:
        cut(model)
    else:
        settings["tensor_parallel"] = {"autotp_size": 2}
    losses, norms, engine = train(model, batches, settings, loss_of, **options)
    assert engine.tensor_ranks == 2 and engine.data_ranks == len(batches[0])
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for ours, theirs in zip(losses, expected):
        assert abs(ours - theirs) <= tolerance * abs(theirs), (losses, expected)
    assert norms[0] > clip, norms  # else nothing is clipped
    for name, value in plain.named_parameters():
        whole = engine.gather(name, master=True)
        assert whole.shape == value.shape and far(whole, value.detach()) <= tolerance, (name, far(whole, value.detach()))
    engine.close()


# transformers' own plans.


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


# Torch's parallelize_module.


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, width=16, hidden=24, depth=3):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.1 * torch.randn_like(parameter)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def vectors(steps, each, width=16, rows=4, length=8):
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return [[(draw(rows, length, width), draw(rows, length, 1)) for _ in range(each)] for _ in range(steps)]


def error_of(model, batch):
    x, y = batch
    return 10 * (model(x) - y).square().mean()


def by_columns_and_rows(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_sequence(model, mesh):
    """Norms have a part of the sequence on each tensor rank, so that their gradients are partial."""
    for i, block in enumerate(model.blocks):
        parallelize_module(block, mesh, {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        })
    parallelize_module(model, mesh, {
        "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    })


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


# Values, names and shapes of the whole.


@on_four
def test_the_whole_model_is_read_written_and_saved(folder):
    import transformers

    mesh_of()
    plain = llama()
    batches = token_batches(2, 2)
    with_torch(plain, batches, optimizer=SGD, clip=0.5)
    model = llama()
    _, _, engine = train(model, batches, config(3, SGD, gradient_clipping=0.5, tensor_parallel={"autotp_size": 2}))
    values = engine.state_dict()
    assert values.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert type(values[name]) is torch.Tensor and values[name].shape == value.shape and far(values[name], value) < 1e-6
    engine.save_pretrained(folder)
    dist.barrier()
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())

    doubled = {name: 2 * value for name, value in values.items()}
    engine.load_state_dict(doubled)
    assert all(torch.equal(engine.gather(name), value) for name, value in doubled.items())
    name = "model.layers.1.self_attn.o_proj.weight"
    engine.write(name, values[name])
    assert torch.equal(engine.gather(name), values[name])
    engine.write(name, doubled[name])

    made, empty = [], torch.empty
    torch.empty = lambda *arguments, **keywords: made.append(empty(*arguments, **keywords)) or made[-1]
    try:
        engine.close(keep_values=True)
    finally:
        torch.empty = empty
    held = [local_of(parameter).untyped_storage().nbytes() for parameter in model.parameters()]
    assert held == [local_of(parameter).nbytes for parameter in model.parameters()]
    assert sum(tensor.nbytes for tensor in made) == sum(held)  # no rank has had more at any time
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole.detach(), doubled[name])


def test_a_block_is_taken_of_pieces_of_the_whole():
    draw = random.Random(5)
    for _ in range(300):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        dimension, ranks, parts = draw.randrange(len(shape)), draw.randint(1, 3), draw.choice([1, 1, 2, 3])
        sizes = [draw.randint(1, 4) for _ in range(ranks)] if parts == 1 else [parts * draw.randint(1, 3)] * ranks
        shape[dimension] = sum(sizes)
        whole, rank = torch.randn(shape), draw.randrange(ranks)
        split = [size // parts for size in sizes]
        expected = torch.cat([part.split(split, dimension)[rank] for part in whole.chunk(parts, dimension)], dimension)
        block, values, begin = torch.full(expected.shape, torch.nan), whole.flatten(), 0
        while begin < len(values):
            piece = values[begin : begin + draw.randint(1, len(values))]
            Block_(dimension, parts, tuple(sizes), rank).take(block, piece, begin)
            begin += len(piece)
        assert torch.equal(block, expected), (shape, dimension, parts, sizes, rank)


@on_four
def test_each_mesh_loads_the_checkpoint_of_another(folder):
    """With four data ranks, and back; the moments too."""
    mesh_of()
    batches, whole = token_batches(2, 4), config(3, ADAMW)
    cut = {**whole, "tensor_parallel": {"autotp_size": 2}}

    def loaded(settings, path):
        model = llama()
        engine = ebb.initialize(model, settings)
        engine.load(path)
        return model, engine

    def state_of(engine):
        return {(name, state): engine.gather(name, master=not state, state=state) for name in engine.state_dict() for state in ("", "exp_avg", "exp_avg_sq")}

    _, _, first = train(llama(), [batches[0]], cut)
    first.save(f"{folder}/cut")
    saved = state_of(first)
    first.close()
    model, second = loaded(whole, f"{folder}/cut")
    assert second.data_ranks == 4 and all(torch.equal(value, saved[key]) for key, value in state_of(second).items())
    second.backward(of_output(model, batches[1][second.data_rank]))
    second.step()
    second.save(f"{folder}/whole")
    saved = state_of(second)
    second.close()
    _, third = loaded(cut, f"{folder}/whole")
    assert third.tensor_ranks == 2 and all(torch.equal(value, saved[key]) for key, value in state_of(third).items())
    third.close()


@on_four
def test_every_rank_may_take_rank_0s_values():
    mesh = mesh_of()["tp"]
    model = Blocks()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    if mesh.get_group() and ebb.world().rank >= 2:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
    by_columns_and_rows(model, mesh)
    with ebb.initialize(model, config(3, SGD), values_of_rank_0=True) as engine:
        assert all(torch.equal(engine.gather(name), value) for name, value in plain.items())


@on_four
def test_a_model_without_values_reads_its_blocks_of_a_file(folder):
    mesh = mesh_of()["tp"]
    plain = Blocks()
    if ebb.world().rank == 0:
        import safetensors.torch

        safetensors.torch.save_file({name: value.detach() for name, value in plain.named_parameters()}, f"{folder}/model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Blocks()
    by_columns_and_rows(model, mesh)
    with ebb.initialize(model, config(3, SGD), weights=folder, device="cpu") as engine:
        assert all(torch.equal(engine.gather(name), value.detach()) for name, value in plain.named_parameters())
        engine.backward(error_of(model, vectors(1, 1)[0][0]))
        engine.step()


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
def test_predictions_are_of_the_largest_block():
    mesh = mesh_of()["tp"]
    model, plain = Blocks(), Blocks()
    by_columns_and_rows(model, mesh)
    states = lambda of, ranks: sum(row.predicted for row in ebb.predict_memory(of, config(1, ADAMW), ranks) if row.state == "optimizer")
    predicted = states(model, 4)
    assert 0 < predicted < states(plain, 2)
    with ebb.initialize(model, config(1, ADAMW)) as engine:
        assert sum(row.peak for row in engine.memory() if row.state == "optimizer") == predicted


@on_four
def test_the_memory_of_a_model_that_will_be_cut_is_predicted_without_ranks():
    mesh_of()
    settings = config(2, ADAMW, tensor_parallel={"autotp_size": 2}, zero={"offload_optimizer": {"device": "cpu"}})
    predicted = ebb.predict_memory(llama(), settings, 4)
    model = llama()
    with ebb.initialize(model, settings) as engine:
        for batches in token_batches(2, 2):
            engine.backward(of_output(model, batches[engine.data_rank])), engine.step()
        engine.report()
        counted = {(row.state, row.tier): (row.predicted, row.peak) for row in engine.memory()}
    held = {"parameter", "master", "gradient", "optimizer"}
    of = {(row.state, row.tier): row.predicted for row in predicted if row.state in held}
    assert len(of) >= 4
    for key, bytes_ in of.items():
        assert counted[key] == (bytes_, bytes_), key


@on_pair
def test_activations_are_those_of_a_tensor_rank():
    """What a forward on two ranks saves, beside the batch; of a model that is cut, and of one that the configuration cuts."""
    mesh_of()
    batch = token_batches(1, 1)[0][0]
    whole = ebb.count_activations(llama(), config(3, SGD), 2, example=batch)
    settings = config(3, SGD, tensor_parallel={"autotp_size": 2})
    model = llama()
    cut_by(model)
    counted = ebb.count_activations(model, settings, 2, example=batch)
    saved, own = {}, {local_of(tensor).untyped_storage().data_ptr() for tensor in (*model.parameters(), *batch.values())}

    def keep(tensor):
        storage = local_of(tensor).untyped_storage()
        saved[storage.data_ptr()] = storage  # keeps it, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        of_output(model, batch)
    numbers = 4  # bytes of the loss, which is not saved
    assert counted.saved - numbers == sum(storage.nbytes() for address, storage in saved.items() if address not in own) < whole.saved
    assert counted.peak < whole.peak
    with refuses("torch has a process group already"):
        ebb.count_activations(llama(), settings, 2, example=batch)


def test_activations_of_a_tensor_rank_are_counted_without_ranks():
    batch = token_batches(1, 1)[0][0]
    whole = ebb.count_activations(llama(), config(3, SGD), 2, example=batch)
    model = llama()
    settings = config(3, SGD, tensor_parallel={"autotp_size": 2})
    ebb.predict_memory(model, settings, 2)  # over a mesh that later ones do not meet in torch's caches
    of_rank, again = (ebb.count_activations(model, settings, 2, example=batch) for _ in range(2))
    assert whole.saved / 2 < of_rank.saved < whole.saved and of_rank.peak < whole.peak and again == of_rank
    assert not dist.is_initialized() and not any(isinstance(parameter, DTensor) for parameter in model.parameters())


# Errors.


@contextlib.contextmanager
def refuses(*texts):
    with pytest.raises(ebb.Error) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), caught.value


@on_four
def test_errors_name_the_parameter_and_its_placement():
    mesh = mesh_of()
    plain = config(3, SGD)

    def with_weight(weight):
        model = Blocks()
        model.blocks[1].up.weight = nn.Parameter(weight)
        return model

    whole = torch.randn(24, 16)
    partial = DTensor.from_local(whole, mesh["tp"], [Partial()], run_check=False)
    with refuses("'blocks.1.up.weight' is a DTensor with the placement Partial"):
        ebb.initialize(with_weight(partial), plain)
    with refuses("'blocks.1.up.weight' is a DTensor over 'dp', with the placement Shard(dim=0)"):
        ebb.initialize(with_weight(distribute_tensor(whole, mesh["dp"], [Shard(0)], src_data_rank=None)), plain)
    with refuses("'blocks.1.up.weight' is a DTensor over 'dp', 'tp'"):
        ebb.initialize(with_weight(distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)), plain)
    outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["tp"]
    with refuses("the mesh of 'blocks.1.up.weight' has the ranks", "must be consecutive", "(2, 2), mesh_dim_names=('dp', 'tp')"):
        ebb.initialize(with_weight(distribute_tensor(whole, outer, [Shard(0)], src_data_rank=None)), plain)
    with refuses('"tensor_parallel.autotp_size" is 4', "over 2 tensor ranks"):
        ebb.initialize(with_weight(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)), {**plain, "tensor_parallel": {"autotp_size": 4}})


@on_four
def test_a_model_that_is_cut_has_the_values_of_rank_0():
    mesh_of()
    model, expected = llama(), llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(ebb.world().rank)
    with refuses("initial values of 'model.embed_tokens.weight'", "values_of_rank_0=True"):
        ebb.initialize(copy.deepcopy(model), config(3, SGD, tensor_parallel={"autotp_size": 2}))
    engine = ebb.initialize(model, config(3, SGD, tensor_parallel={"autotp_size": 2}), values_of_rank_0=True)
    for name, value in expected.named_parameters():
        assert torch.equal(engine.gather(name), value), name
    engine.close()


@on_four
def test_ranks_that_ask_for_different_numbers_of_tensor_ranks_get_an_error():
    with refuses("2, 2, 4, 4"):
        ebb.initialize(llama(), config(3, SGD, tensor_parallel={"autotp_size": 2 if ebb.world().rank < 2 else 4}))
    mesh_of()
    is_like_torch(llama, token_batches(1, 2), settings={"stage": 3})


@on_four
def test_what_no_plan_can_cut_is_refused_by_name():
    mesh_of()
    with refuses("Blocks has no tp_plan", "parallelize_module"):
        ebb.initialize(Blocks(), config(3, SGD, ebb={"mesh": {"tensor": 2}}))
    with refuses('"tensor_parallel.autotp_size" is 3, which does not divide the 4 rank(s)'):
        ebb.initialize(llama(), config(3, SGD, tensor_parallel={"autotp_size": 3}))
    with refuses('num_key_value_heads 2 is not divisible by "tensor_parallel.autotp_size" 4: take 1 or 2'):
        ebb.initialize(llama(), config(3, SGD, tensor_parallel={"autotp_size": 4}))
    import peft

    with refuses("PeftModelForCausalLM has adapters of peft"):
        adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        ebb.initialize(adapted, config(3, SGD, tensor_parallel={"autotp_size": 2}))
    with refuses("ebb.mesh.tensor", "autotp_size"):
        ebb.initialize(llama(), config(3, SGD, ebb={"mesh": {"tensor": 2}}, tensor_parallel={"autotp_size": 4}))


@on_four
def test_replicas_whose_gradients_differ_are_an_error_on_every_rank():
    mesh = mesh_of()["tp"]
    model = Blocks()
    by_columns_and_rows(model, mesh)
    engine = ebb.initialize(model, config(3, SGD))
    model.norm.weight.register_hook(lambda gradient: gradient * (1 + engine.tensor_rank))
    with refuses("norm", "differs between tensor ranks"):
        engine.backward(error_of(model, vectors(1, 1)[0][0]))
        engine.step()
        engine.report()
    engine.close()


@on_four
def test_other_samples_of_tensor_ranks_are_an_error_on_every_rank():
    """A vocabulary that is cut mixes them into one sequence, so that all gradients of whole parameters are equal."""
    mesh_of()
    model = llama()
    engine = ebb.initialize(model, config(3, SGD, tensor_parallel={"autotp_size": 2}))
    with refuses("losses of tensor ranks 0 and 1 differ", "data_rank"):
        engine.backward(of_output(model, token_batches(1, 4)[0][ebb.world().rank]))
        engine.step()
        engine.report()
    engine.close()


# Exceptions.


@pytest.fixture
def fresh():
    """Ranks whose torch is not used again."""
    yield from staying(4)


on_fresh = _on("fresh")


@on_four
def test_what_all_tensor_ranks_of_a_data_rank_raise_ends_one_step():
    mesh_of()
    model = llama()
    engine = ebb.initialize(model, config(3, SGD, tensor_parallel={"autotp_size": 2}))
    for step, batches in enumerate(token_batches(3, 2)):
        try:
            loss = of_output(model, batches[engine.data_rank])
            if step == 1 and engine.data_rank == 1:
                raise ValueError(f"this sample has no label, says rank {ebb.world().rank}")
            engine.backward(loss)
            engine.step()
            assert engine.report().applied and step != 1
        except (ebb.Error, ValueError) as error:
            assert step == 1 and "this sample has no label" in str(error)
            engine.drop()
    assert engine.report().step == 2
    engine.close()


@on_fresh
def test_what_one_tensor_rank_raises_is_the_error_of_every_rank():
    """Its tensor rank waits for it in torch, and the other data rank in Ebb."""
    mesh_of()
    model = llama()
    engine = ebb.initialize(model, config(3, SGD, tensor_parallel={"autotp_size": 2}))
    batches = token_batches(2, 2)
    engine.backward(of_output(model, batches[0][engine.data_rank])), engine.step()
    connection, other_end = socket.socketpair()  # not gloo's
    selector = selectors.EpollSelector()
    selector.register(connection, selectors.EVENT_READ)
    said = "rank 1 (data rank 0, tensor rank 1) has left its tensor ranks alone: ValueError: this sample has no label"
    try:
        loss = of_output(model, batches[1][engine.data_rank])
        if ebb.world().rank == 1:
            raise ValueError("this sample has no label")
        engine.backward(loss), engine.step(), engine.report()
        raise AssertionError("no error")
    except (ebb.Error, ValueError) as error:
        assert ebb.world().rank == 1 or said in str(error), error
        with refuses(said, "begin again from a checkpoint"):
            engine.drop()
    with refuses(said):
        model(**batches[0][0])
    other_end.send(b"still open")
    assert selector.select(60) and connection.recv(99) == b"still open"
    engine.close()


def _loses_a_rank(place):
    mesh_of()
    model = llama()
    engine = ebb.initialize(model, config(3, SGD, tensor_parallel={"autotp_size": 2}))
    batch = token_batches(1, 1)[0][0]
    engine.backward(of_output(model, batch)), engine.step()

    def end(*arguments):
        if engine.tensor_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    middle = model.model.layers[1]
    middle.register_forward_pre_hook(end) if place == "forward" else middle.register_full_backward_hook(end)
    with pytest.raises(RuntimeError, match="rank 1 .* has died"):
        engine.backward(of_output(model, batch))
    with pytest.raises(ebb.Error, match="rank 1 .* has died"):
        engine.drop()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_of_a_death_the_tensor_rank_has_ebbs_words(place):
    ranks = Ranks(2)
    with pytest.raises(AssertionError) as caught:
        ranks.run(_loses_a_rank, place)
    assert "rank 1 has died, exit code -9" in str(caught.value) and "rank 0" not in str(caught.value)


# transformers' Trainer.


@on_four
def test_the_trainer_gives_tensor_ranks_the_same_samples(folder):
    import os

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
