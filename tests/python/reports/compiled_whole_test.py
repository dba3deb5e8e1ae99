"""torch.compile of the whole model, before or after initialize: blocks are compiled, and hooks of units run between them."""

import pytest
import torch
from modules import Blocks
from ranks import on_places
from training import squared_error, with_engine, with_torch

import ebb


def _trained(place, make, call_of, graphs):
    """`call_of`: what the loop calls instead of the model."""
    batches = place.batches()
    expected = with_torch(Blocks(), batches, squared_error)
    for example in (None, batches[0][0][:1]):
        model = make()
        engine = ebb.initialize(model, place.config(), example=example)
        call = call_of(model)
        torch._dynamo.reset()
        graphs.clear()
        for of_step, loss in zip(batches, expected):
            x, y = of_step[engine.world.rank]
            engine.backward((call(x) - y).square().mean())
            engine.step()
            assert engine.report().loss == pytest.approx(loss, abs=2e-6)
        assert graphs, "nothing was compiled"
        assert set(engine.state_dict()) == set(Blocks().state_dict())
        engine.close()


@pytest.mark.parametrize("how", ["model.compile() before", "model.compile() after", "torch.compile(model) before", "torch.compile(model) after",
                                 "torch.compile of a function"])
@on_places
def test_numbers_are_those_of_torch(place, how):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compiled(model):
        model.compile(backend=backend)
        return model

    same = lambda model: model
    wrapped = lambda model: torch.compile(model, backend=backend)
    {
        "model.compile() before": lambda: _trained(place, lambda: compiled(Blocks()), same, graphs),
        "model.compile() after": lambda: _trained(place, Blocks, compiled, graphs),
        "torch.compile(model) before": lambda: _trained(place, lambda: wrapped(Blocks()), same, graphs),
        "torch.compile(model) after": lambda: _trained(place, Blocks, wrapped, graphs),
        "torch.compile of a function": lambda: _trained(place, Blocks, lambda model: torch.compile(lambda x: model(x), backend=backend), graphs),
    }[how]()


@on_places
def test_fullgraph_is_an_error_of_torch(place):
    engine = ebb.initialize(model := Blocks(), place.config())
    torch._dynamo.reset()  # else the code of an earlier model may fit
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8))
    engine.drop()
    engine.close()


@on_places
def test_a_compiled_loss(place):
    """It is compiled once, and a parameter that it reads outside of its unit has an error."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    error_of = torch.compile(lambda y, target: (y - target).square().mean(), backend=backend)
    batches = place.batches()
    losses, _ = with_engine(Blocks(), batches, lambda model, batch: error_of(model(batch[0]), batch[1]), place.config())
    assert losses == pytest.approx(with_torch(Blocks(), batches, squared_error), abs=2e-6)
    assert len(graphs) == 1
    engine = ebb.initialize(model := Blocks(), place.config())
    penalty = torch.compile(lambda weight: weight.square().sum(), backend=backend)
    with pytest.raises(Exception, match="'blocks.0.weight' is read by square outside of its unit"):
        penalty(model.blocks[0].weight)
    engine.close()
