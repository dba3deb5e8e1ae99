"""Names, shapes and values of a cut model are those of the whole one, on each mesh."""

import copy
import random

import torch
import torch.distributed as dist
from cut_models import SGD, Blocks, by_columns_and_rows, error_of, far, mesh_of, refuses, train, vectors
from ranks import on_four
from torch.distributed.tensor import DTensor
from training import ADAMW, config, llama, of_output, token_batches, with_torch

import ebb
from ebb._blocks import Block, local_of


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
            Block(dimension, parts, tuple(sizes), rank).take(block, piece, begin)
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
