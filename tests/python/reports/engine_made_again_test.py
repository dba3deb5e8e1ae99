"""An engine is closed and another one made for the same model, and models that are given without values."""

import copy
import os

import pytest
import torch
from pitfalls_test import refused
from ranks import on_one, on_places
from torch import nn
from training import config, mlp, offloaded, squared_error, vector_batches

import ebb

BATCHES = [batch for (batch,) in vector_batches(6, 1)]


def _train(engine, plain, batches):
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches:
        engine.backward(squared_error(engine.model, batch)), engine.step()
        squared_error(plain, batch).backward()
        optimizer.step(), optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        assert torch.allclose(engine.gather(name), value, atol=2e-6), name


@pytest.mark.parametrize("is_told", [True, False], ids=["keeps_values", "loses_values"])
@on_places
def test_the_new_engine_begins_with_the_values(settings, is_told):
    model = mlp()
    plain = copy.deepcopy(model)
    engine = ebb.initialize(model, settings, resident=["4.weight"])
    _train(engine, plain, BATCHES[:2])
    if not is_told:
        engine.close()
        refused(lambda: ebb.initialize(model, settings), r"'0.weight' has no values.*keep_values=True.*assign=True")
        model.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=True)
    else:
        engine.backward(squared_error(model, BATCHES[0]))
        refused(lambda: engine.close(keep_values=True), r"within a step")
        engine.drop()
        engine.suspend()
        refused(lambda: engine.close(keep_values=True), r"resume\(\) first")
        engine.resume()
        engine.close(keep_values=True)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=2e-6), name
    squared_error(model, BATCHES[0]).backward()  # a model of torch again
    model.zero_grad()
    engine = ebb.initialize(model, settings)
    _train(engine, plain, BATCHES[2:4])
    engine.close()


@on_places
def test_a_rank_without_memory_leaves_the_engine_open_on_all(settings):
    model = mlp()
    plain = copy.deepcopy(model)
    engine = ebb.initialize(model, settings)
    whole = torch.empty

    def empty(*arguments, **keywords):
        if engine.world.rank == engine.world.size - 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(*arguments, **keywords)

    torch.empty = empty
    try:
        refused(lambda: engine.close(keep_values=True), "does not fit into memory.*The engine is still open", "RESOURCE_EXHAUSTED")
    finally:
        torch.empty = whole
    _train(engine, plain, BATCHES[:1])
    engine.close(keep_values=True)
    assert not any(value.isnan().any() for value in model.parameters())


@on_one
def test_each_type_comes_back(settings):
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).bfloat16()
    model[1].weight = nn.Parameter(torch.arange(64, dtype=torch.uint8).view(8, 8), requires_grad=False)
    model[1].forward = lambda x: x * model[1].weight.to(x.dtype).sum() + model[1].bias
    model[2].float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = ebb.initialize(model, {**settings, "bf16": {"enabled": True}})
    engine.close(keep_values=True)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name


@on_places
def test_a_model_with_nan_is_refused_by_name(settings):
    for name in ("0.weight", "6.bias"):
        for resident in ([], [name]):
            model = mlp()
            with torch.no_grad():
                model.get_parameter(name).view(-1)[-1] = float("nan")
            refused(lambda: ebb.initialize(model, settings, resident=resident), f"'{name}' are NaN", "INVALID_ARGUMENT")
    ebb.initialize(mlp(), settings).close()


@on_one
def test_a_forked_worker_does_not_keep_the_space_on_the_disk(folder):
    engine = ebb.initialize(mlp(64), config(zero=offloaded(folder)))
    squared_error(engine.model, (torch.randn(2, 64), torch.randn(2, 1))).backward()
    engine.step()
    go_on, asked = os.pipe()
    child = os.fork()
    if child == 0:  # as a worker of a data loader: it holds all files of its parent
        os.close(asked)
        os.read(go_on, 1)
        os._exit(0)

    def held():
        """Blocks of the run's files on the disk, by the child's open files."""
        blocks = []
        for number in os.listdir(f"/proc/{child}/fd"):
            path = f"/proc/{child}/fd/{number}"
            if folder in os.readlink(path) and "/lock" not in os.readlink(path) and not os.path.isdir(path):
                blocks.append(os.stat(path).st_blocks)
        return blocks

    try:
        before = held()
        engine.close()
        after = held()
    finally:
        os.close(asked)
        os.waitpid(child, 0)
    assert sum(before) > 0 and len(after) == len(before) and sum(after) == 0
