"""Predicted memory and counted activations of a model that is cut, or will be."""

import pytest
import torch
import torch.distributed as dist
from cut_models import SGD, Blocks, by_columns_and_rows, cut_by, mesh_of, refuses
from ranks import on_alone, on_four, on_pair, staying
from torch.distributed.tensor import DTensor
from training import ADAMW, config, llama, of_output, token_batches

import ebb
from ebb._blocks import local_of


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


@pytest.fixture
def alone():
    """A process that has no process group of torch's."""
    yield from staying(1)


@on_alone
def test_activations_of_a_tensor_rank_are_counted_without_ranks():
    batch = token_batches(1, 1)[0][0]
    whole = ebb.count_activations(llama(), config(3, SGD), 2, example=batch)
    model = llama()
    settings = config(3, SGD, tensor_parallel={"autotp_size": 2})
    ebb.predict_memory(model, settings, 2)  # over a mesh that later ones do not meet in torch's caches
    of_rank, again = (ebb.count_activations(model, settings, 2, example=batch) for _ in range(2))
    assert whole.saved / 2 < of_rank.saved < whole.saved and of_rank.peak < whole.peak and again == of_rank
    assert not dist.is_initialized() and not any(isinstance(parameter, DTensor) for parameter in model.parameters())
