"""Copies of a sharded parameter outside of its unit, where it has no value: for a file, a target network, an average, a log or a branch. Each is an
error that names the parameter. What needs no value, as counting parameters, goes on."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from modules import Blocks
from pitfalls_test import refused, refused_in_a_thread
from ranks import on_places
from torch import nn
from training import SGD, squared_error, vector_batches

import ebb

NAMED = r"'blocks.0.weight' is read by {}.* outside of its unit, at .*copied_parameters_test.py:\d+, .*engine.gather\('blocks.0.weight'\)"
W = "blocks.0.weight"


def _update(target, model, rate=0.1):
    for of_target, parameter in zip(target.parameters(), model.parameters()):
        of_target.data.copy_(rate * parameter.data + (1 - rate) * of_target.data)


# What a loop does, and the operator that the error names.
COPIES = {
    "saved dict": (lambda model, _: torch.save(dict(model.named_parameters()), io.BytesIO()), "__reduce_ex__"),
    "saved list": (lambda model, _: torch.save(list(model.parameters()), io.BytesIO()), "__reduce_ex__"),
    "saved data": (lambda model, _: torch.save([parameter.data for parameter in model.parameters()], io.BytesIO()), "__reduce_ex__"),
    "pickled": (lambda model, _: pickle.dumps(model.get_parameter(W)), "__reduce_ex__"),
    "deep copy": (lambda model, _: copy.deepcopy(model.get_parameter(W)), "clone"),
    "deep copies": (lambda model, _: copy.deepcopy(dict(model.named_parameters())), "clone"),
    "clone": (lambda model, _: {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, "clone"),
    "clone of data": (lambda model, _: [parameter.data.clone() for parameter in model.parameters()], "clone"),
    "view": (lambda model, _: [parameter.data.view(-1).t().clone() for parameter in model.parameters()], "clone"),
    "another type": (lambda model, _: model.get_parameter(W).to(torch.bfloat16), "to"),
    "numpy": (lambda model, _: model.get_parameter(W).detach().cpu().numpy(), "numpy"),
    "list": (lambda model, _: model.get_parameter(W).tolist(), "tolist"),
    "vector": (lambda model, _: nn.utils.parameters_to_vector(model.parameters()), "cat"),
    "parameters of another": (lambda model, _: nn.ParameterList([nn.Parameter(one.data) for one in model.parameters()]), "nn.Parameter"),
    "a parameter of it": (lambda model, _: nn.Parameter(model.get_parameter(W)), "nn.Parameter"),
    "soft update": (lambda model, target: _update(target, model), "__r?mul__|mul"),
    "hard update": (lambda model, target: [one.data.copy_(other.data) for one, other in zip(target.parameters(), model.parameters())], "copy_"),
    "copy_": (lambda model, target: target.get_parameter(W).copy_(model.get_parameter(W)), "copy_"),
    "lerp": (lambda model, target: target.get_parameter(W).lerp_(model.get_parameter(W), 0.1), "lerp_"),
    "foreach": (lambda model, target: torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), 0.1), "_foreach_lerp_"),
    "average": (lambda model, target: target.get_parameter(W).mul_(0.9).add_(model.get_parameter(W), alpha=0.1), "add_"),
    "branch": (lambda model, _: model.get_parameter(W).abs().max().item() > 10, "abs"),
    "comparison": (lambda model, _: (model.get_parameter(W) > 10).any(), "gt|__gt__"),
    "norm": (lambda model, _: sum(parameter.norm() for parameter in model.parameters()), "norm"),
    "histogram": (lambda model, _: torch.histc(model.get_parameter(W).float()), "histc"),
    "penalty": (lambda model, _: sum(parameter.pow(2).sum() for parameter in model.parameters()), "pow"),
}


@torch.jit.script
def _sum(x: torch.Tensor):
    return x.sum()


def _given(parameter):
    other = nn.Parameter(torch.zeros_like(parameter))
    other.data = parameter.data
    return other.sum()


# Ways to a tensor's memory on which torch calls no code of a class. NumPy and DLPack have no error for a tensor that needs a gradient here.
MEMORY = {
    "tensor": lambda parameter: torch.tensor(parameter),
    "Tensor": lambda parameter: torch.Tensor(parameter).sum(),
    "asarray": lambda parameter: torch.asarray(parameter.detach(), dtype=torch.float64),
    "plain": lambda parameter: parameter.detach().as_subclass(torch.Tensor).sum(),
    "kept plain": lambda parameter: torch.Tensor.as_subclass(parameter, torch.Tensor) + 1,
    "data of another": _given,
    "storage": lambda parameter: parameter.untyped_storage().tolist(),
    "typed storage": lambda parameter: parameter.storage()[0],
    "address": lambda parameter: parameter.data_ptr(),
    "DLPack": lambda parameter: torch.utils.dlpack.to_dlpack(parameter.detach()),
    "from DLPack": lambda parameter: torch.from_dlpack(parameter.detach()),
    "nested": lambda parameter: torch.nested.nested_tensor([parameter]),
    "vmap": lambda parameter: torch.vmap(lambda row: 2 * row)(parameter),
    "script": lambda parameter: _sum(parameter),
    "set_": lambda parameter: torch.empty(0).set_(parameter.detach()).sum(),
    "without functions": lambda parameter: _without_functions(parameter),
    "random": lambda parameter: torch.bernoulli(parameter.detach().as_subclass(torch.Tensor)),
}


def _without_functions(parameter):
    with torch._C.DisableTorchFunction():
        return parameter.sum()


@on_places
def test_no_way_to_the_memory_finds_any(place):
    settings = place.config(optimizer=SGD)
    model = Blocks()
    engine = ebb.initialize(model, settings)
    batch = vector_batches(1, 2)[0][engine.world.rank]
    for _ in range(2):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of copies by torch.tensor, of typed storages and of nested tensors
            for what, read in MEMORY.items():
                with pytest.raises(RuntimeError, match="'blocks.0.weight' (has no value here|is read by)"):
                    print(what, read(model.get_parameter(W)))
        engine.backward(squared_error(model, batch))
        assert engine.step() and engine.report().applied
    parameter = model.get_parameter(W)
    engine.close()
    with pytest.raises(RuntimeError, match="'blocks.0.weight' has no value here"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.tensor(parameter)


@on_places
def test_a_copy_is_refused_by_name(place):
    settings = place.config(optimizer=SGD)
    model, target = Blocks(), Blocks()
    engine = ebb.initialize(model, settings)
    batch = vector_batches(1, 2)[0][engine.world.rank]
    before = copy.deepcopy(target.state_dict())
    for _ in range(2):  # before the first step, and after one
        with torch.no_grad():
            for copied, what in COPIES.values():
                refused(lambda: copied(model, target), NAMED.format(f"({what})"))
        for name in ("average",):  # has halved the target before it read
            target.load_state_dict(before)
        refused(lambda: COPIES["penalty"][0](model, None), NAMED.format("pow"))
        try:
            target.load_state_dict(dict(model.named_parameters()))
        except RuntimeError as error:
            assert all(f"'{name}' is read by copy_" in str(error) for name in before)
        else:
            raise AssertionError("a state of NaN was loaded")
        refused(lambda: engine.write(W, model.get_parameter(W)), "'blocks.0.weight' is read by contiguous .*, at .*copied_parameters_test.py")
        for loaded in (model, model.blocks[0]):
            refused(lambda: loaded.load_state_dict(dict(loaded.named_parameters())), "'blocks.0.weight' is given the model's own parameter")
        assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
        engine.backward(squared_error(model, batch))
        assert engine.step() and engine.report().applied
    engine.close()
    refused(lambda: torch.save(model.state_dict(), io.BytesIO()), "'blocks.0.weight' is read by __reduce_ex__ after its engine was closed")
    refused(lambda: copy.deepcopy(model), "'blocks.0.weight' is read by clone after its engine was closed")


@on_places
def test_within_a_step_on_one_rank_and_in_another_thread(place):
    """The step ends on every rank, with the text."""
    settings = place.config(optimizer=SGD)
    model, target = Blocks(), Blocks()
    engine = ebb.initialize(model, settings)
    batch = vector_batches(1, 2)[0][engine.world.rank]
    engine.backward(squared_error(model, batch))
    if engine.world.rank == engine.world.size - 1:
        refused(lambda: _update(target, model), NAMED.format("(__r?mul__|mul)"))
        refused(engine.step, "'blocks.0.weight' is read by.*Call drop")
    else:
        refused(lambda: (engine.step(), engine.report()), "rank 1.*'blocks.0.weight' is read by")
    engine.drop()
    engine.backward(squared_error(model, batch)), engine.step()
    assert engine.report().applied
    engine.backward(squared_error(model, batch))
    refused_in_a_thread(lambda: COPIES["norm"][0](model, None), "'blocks.0.weight' is read by norm")
    engine.step()
    assert engine.report().applied
    engine.close()


@on_places
def test_what_needs_no_value_is_as_with_torch(place):
    settings = place.config(optimizer=SGD)
    import peft
    import transformers

    torch.manual_seed(1)
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))
    kinds = {name: (type(one), one.shape, one.dtype, one.device, one.requires_grad, one.numel()) for name, one in model.named_parameters()}
    said = model.get_nb_trainable_parameters(), base.num_parameters(), base.device, base.dtype, repr(model), base.get_memory_footprint()
    engine = ebb.initialize(model, settings)
    for name, one in model.named_parameters():
        kind, *rest = kinds[name]
        assert [one.shape, one.dtype, one.device, one.requires_grad, one.numel()] == rest
        assert isinstance(one, kind) and type(one).__name__ == kind.__name__ and one.is_leaf and one.is_contiguous() in (False, True)
        assert f"'{name}'" in str(one) and f"'{name}'" in f"{one.data}", str(one)
        assert torch.zeros_like(one).shape == one.shape and len({one, one}) == 1 and one.data.dtype == one.dtype
        assert one.to(one.dtype).to(one.device) is one
    assert said == (model.get_nb_trainable_parameters(), base.num_parameters(), base.device, base.dtype, repr(model), base.get_memory_footprint())
    model.print_trainable_parameters()
    model.to(base.device).train()
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0 / (step + 1))
    ids = torch.arange(8).view(1, 8)
    engine.backward(model(input_ids=ids, labels=ids).loss), engine.step(), schedule.step()
    assert engine.report().applied
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    assert all(value.isfinite().all() for value in torch.load(stored).values())
    engine.close()


@on_places
def test_averages_and_copies_that_the_error_names_are_right(place):
    """As the errors say: an average of engine.state_dict(), and a copy by copy_parameters_from."""
    batches = place.batches()
    model, plain = Blocks(), Blocks()
    engine = ebb.initialize(model, place.config(optimizer=SGD, gradient_clipping=0))
    other = ebb.initialize(Blocks(), place.config(optimizer=SGD), name="target")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    averages = [copy.deepcopy(plain.state_dict()) for _ in range(2)]
    for of_step in batches:
        engine.backward(squared_error(model, of_step[engine.world.rank])), engine.step()
        optimizer.zero_grad()
        sum(squared_error(plain, batch) / len(of_step) for batch in of_step).backward()
        optimizer.step()
        for average, values in zip(averages, (engine.state_dict(), plain.state_dict())):
            for name, value in average.items():
                value.lerp_(values[name], 0.1)
    other.copy_parameters_from(engine)
    for name, value in averages[0].items():
        assert torch.allclose(value, averages[1][name], atol=2e-6), name
        assert torch.equal(other.gather(name), engine.gather(name))
    other.close(), engine.close()


@on_places
def test_a_write_to_a_value_of_state_dict_is_refused_until_it_is_loaded(place):
    """With torch, the values of model.state_dict() are the parameters."""
    settings = place.config(optimizer=SGD)
    model = Blocks()
    engine = ebb.initialize(model, settings)
    batch = vector_batches(1, 2)[0][engine.world.rank]
    own = model.state_dict()
    own[W].mul_(0.5)
    refused(lambda: model(batch[0]), rf"'{W}' of model.state_dict\(\) was written to, but it is a copy")
    own[W].mul_(0.5)
    model.load_state_dict(own)  # as loops do that load what fits
    changed = engine.state_dict()
    changed[W].zero_()
    engine.backward(squared_error(model, batch)), engine.step()
    assert torch.allclose(engine.gather(W), own[W], atol=0.1) and not torch.equal(own[W], changed[W])
    engine.close()
