"""What goes wrong elsewhere when a module is sharded by hooks: each ends in torch's numbers, or in an error that names the module."""

import copy
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import training
from modules import (Blocks, CachedIntermediate, Checkpointed, CheckpointedReentrant, CheckpointOverTwo, Containers, EarlyStopped, FailsInBackward,
                     FrozenFirst, FrozenMiddle, FusedHead, InPlaceOnAView, LeftOut, ListsOfLists, MixtureOfExperts, OtherMethod,
                     PassedThrough, ReadInBackward, Resident, SharedList, UsedTwice)
from ranks import on_one, on_two
from torch import nn
from training import compare, config, llama, mlp, squared_error, token_batches, vector_batches

import ebb

RIGHT = [Blocks, InPlaceOnAView, CachedIntermediate, UsedTwice, Checkpointed, CheckpointedReentrant, CheckpointOverTwo, EarlyStopped, FrozenMiddle,
         FrozenFirst, LeftOut, Containers, PassedThrough, Resident, ListsOfLists, OtherMethod, MixtureOfExperts, SharedList, FusedHead,
         ReadInBackward]
WITHOUT_AN_EXAMPLE = [Blocks, InPlaceOnAView, CachedIntermediate, Checkpointed, EarlyStopped, Containers, Resident, OtherMethod, SharedList, FusedHead]


@pytest.mark.parametrize(
    "kind, registered", [*((kind, False) for kind in RIGHT), *((kind, True) for kind in WITHOUT_AN_EXAMPLE)],
    ids=lambda value: getattr(value, "__name__", "registered" if value else "shown"),
)
@on_two
def test_numbers_are_those_of_torch(kind, registered):
    batches = vector_batches(4, 2)
    optimizer = training.SGD if kind in (CachedIntermediate, LeftOut, MixtureOfExperts, PassedThrough) else training.ADAMW  # torch leaves out what has no gradient
    compare(kind, batches, squared_error, optimizer=optimizer, example=None if registered else (batches[0][0][0],))


@on_two
def test_two_forwards_for_one_backward():
    """Two forwards for one backward: a function of the model shows the order."""
    batches = vector_batches(3, 2)

    def loss_of(model, batch):
        x, y = batch
        return (model(x) - y).square().mean() + (model(-x) + y).square().mean()

    compare(Checkpointed, batches, loss_of, example=lambda model: loss_of(model, (torch.zeros(2, 8), torch.zeros(2, 1))))


def refused(action, text, code=None):
    with pytest.raises(ebb.Error, match=text) as caught:
        action()
    assert code is None or caught.value.code == code


def refused_in_a_thread(action, text):
    with ThreadPoolExecutor(1) as thread:
        refused(lambda: thread.submit(action).result(), text)


@on_two
def test_an_order_that_was_not_declared_is_an_error_that_names_the_module():
    batch = vector_batches(1, 2)[0][0]
    model = Blocks()
    engine = ebb.initialize(model, config())
    loss = squared_error(model, batch) + squared_error(model, batch)

    def run():
        engine.backward(loss)
        engine.step()
        engine.report()

    refused(run, "blocks|head")
    engine.drop()
    engine.backward(squared_error(model, batch)), engine.step()
    assert engine.report().applied
    engine.close()


class External(Blocks):
    """A parameter that is used outside of its module."""

    def forward(self, x):
        return super().forward(x) + self.blocks[0].bias.sum()


@on_two
def test_a_parameter_outside_of_its_module():
    batches = vector_batches(3, 2)
    compare(External, batches, squared_error, resident=["blocks.0.bias"], example=(batches[0][0][0],))
    model = External()
    engine = ebb.initialize(model, config(), check=True)
    with torch.no_grad():  # no batch has shown it yet
        refused(lambda: model(batches[0][0][0]), r"'blocks.0.bias' is read by sum outside of its unit, at .*pitfalls_test.py")
    engine.close()
    model = External()
    engine = ebb.initialize(model, config())
    with torch.no_grad():
        refused(lambda: model(batches[0][0][0]), r"'blocks.0.bias' is read by sum outside of its unit, at .*pitfalls_test.py")
    refused(lambda: model(batches[0][0][0]), "'blocks.0.bias' is used outside of its module: name it in resident=")
    engine.close()
    model = ReadInBackward()
    engine = ebb.initialize(model, config())
    refused(lambda: model(batches[0][0][0]), "'middle.weight' is used outside of its module: name it in resident=")
    engine.close()


@on_two
def test_shapes_are_true_and_state_dicts_whole():
    model, plain = llama(), llama()
    engine = ebb.initialize(model, config())
    for (name, ours), (other, theirs) in zip(model.named_parameters(), plain.named_parameters()):
        assert name == other and ours.shape == theirs.shape and ours.stride() != ()
        refused(ours.isnan, f"'{name}' is read by isnan outside of its unit")
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    refused(lambda: copy.deepcopy(model), "sharded")
    refused(lambda: pickle.dumps(model), "sharded")
    with pytest.raises(RuntimeError):
        model.lm_head.weight.data.copy_(plain.lm_head.weight)
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    model.load_state_dict(changed)
    for name, value in engine.state_dict().items():
        assert torch.equal(value, changed[name])
    refused(lambda: ebb.initialize(model, config()), "close", "ALREADY_EXISTS")
    engine.close()
    refused(lambda: copy.deepcopy(model), "after its engine was closed")


@on_two
def test_an_optimizer_that_was_made_before_raises():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = ebb.initialize(model, config())
    x, y = vector_batches(1, 2)[0][engine.world.rank]
    loss = (model(x) - y).square().mean()
    engine.backward(loss)
    refused(optimizer.step, "AdamW.step.*the engine updates '0.weight'")
    engine.step()
    engine.close()


@on_two
def test_a_child_is_called_first():
    """No module is the root: a child may be called by itself, first."""
    model, plain = Blocks(), Blocks()
    engine = ebb.initialize(model, config())
    x = torch.ones(2, 8)
    with torch.no_grad():
        assert torch.equal(model.blocks[1](x), plain.blocks[1](x))
        assert torch.equal(model(x), plain(x))
    engine.close()


def _generate_differently():
    """Ranks that run forward a different number of times."""
    model = llama().eval()
    engine = ebb.initialize(model, config(ebb={"timeout_seconds": 20}))
    ids = token_batches(1, 1)[0][0]["input_ids"]
    with torch.no_grad():
        for _ in range(1 + engine.world.rank):
            model(ids)
    try:
        engine.state_dict()
    except ebb.Error as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_ranks_that_differ_get_an_error(two):
    texts = two.run(_generate_differently)
    assert any(texts), texts
    two.stop()


@pytest.mark.parametrize("shown", [True, False])
@on_two
def test_compiled_blocks(shown):
    batches, graphs = vector_batches(3, 2), []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def make():
        model = Blocks()
        for block in model.blocks:
            block.compile(backend=counted, dynamic=False)
        return model

    compare(make, batches, squared_error, example=(batches[0][0][0],) if shown else None)
    assert graphs, "compile() was given another backend"


@on_one
def test_blocks_whose_compilation_is_disabled():
    model, graphs = Blocks(), []
    for block in model.blocks:
        block.compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward, disable=True)
    engine = ebb.initialize(model, config())
    engine.backward(squared_error(model, vector_batches(1, 1)[0][0]))
    engine.step()
    engine.close()
    assert not graphs and all("forward" not in vars(block) for block in model.blocks)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler needs g++")
@on_two
def test_blocks_of_torchs_compiler():
    """Its code reads memory, which the fake tensors that show the order do not have."""
    def make():
        model = llama()
        for layer in model.model.layers:
            layer.compile()
        return model

    compare(make, token_batches(2, 2))


@on_two
def test_hooks_of_others():
    """What a pre-hook of the user's sees is there."""
    model = Blocks()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, x: seen.append(module.weight.isnan().any().item()))
    engine = ebb.initialize(model, config())
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert seen == [False]
    engine.close()
    model._hf_hook = object()
    refused(lambda: ebb.initialize(model, config()), "accelerate", "UNIMPLEMENTED")


@on_two
def test_what_is_refused_says_so():
    x, y = vector_batches(1, 1)[0][0]
    model = mlp()
    engine = ebb.initialize(model, config(fp16={"enabled": True}))
    loss = (model(x.half()) - y).square().mean()
    refused(loss.backward, "engine.backward")
    engine.drop()
    engine.close()

    model = mlp()
    engine = ebb.initialize(model, config())
    refused(lambda: engine.step(), "without a forward")
    refused(lambda: engine.backward(torch.ones((), requires_grad=True)), "without a forward of the model")
    loss = (model(x) - y).square().mean()
    refused(lambda: torch.autograd.grad(loss, list(model.parameters()), create_graph=True), "create_graph")
    engine.drop()
    loss = (model(x) - y).square().mean()
    engine.backward(loss)
    engine.step()
    refused(lambda: engine.gather("nothing"), "no parameter 'nothing'", "NOT_FOUND")
    engine.close()
    refused(engine.step, "closed")


@on_two
def test_after_exceptions_drop_goes_on():
    """An error in forward, in backward, and in the loop: drop(), and go on as if it had not been."""
    batches = vector_batches(3, 2)
    plain = Blocks()
    expected = training.with_torch(plain, batches, squared_error)

    model = Blocks()
    engine = ebb.initialize(model, config())
    losses = []
    for of_step in batches:
        x, y = of_step[engine.world.rank]
        fails = model.blocks[1].register_forward_pre_hook(lambda module, arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        fails.remove()
        engine.drop()
        with pytest.raises(ValueError, match="in backward"):
            hidden = torch.tanh(FailsInBackward.apply(torch.tanh(model.blocks[0](x))))
            engine.backward(model.head(model.blocks[1](hidden)).sum())
        refused(engine.step, "drop")
        engine.drop()
        engine.backward(squared_error(model, (x, y)))
        engine.step()
        losses.append(engine.report().loss)
    engine.close()
    for ours, theirs in zip(losses, expected):
        assert abs(ours - theirs) < 2e-6


@on_two
def test_checkpointing_computes_forward_twice():
    """Saved-tensor hooks around a unit must not turn recomputation off."""
    counts = [0]

    class Counted(nn.Linear):
        def forward(self, x):
            counts[0] += type(x) is torch.Tensor  # else it shows the order of visits
            return super().forward(x)

    model = Blocks()
    model.blocks = nn.ModuleList([Counted(8, 8) for _ in range(3)])
    model.forward = lambda x: Checkpointed.forward(model, x)
    model.__class__.reentrant = False
    engine = ebb.initialize(model, config())
    x, y = vector_batches(1, 1)[0][0]
    for _ in range(4):
        engine.backward((model(x) - y).square().mean())
        engine.step()
    engine.close()
    assert counts[0] == 4 * 2 * 3
