"""Training loops as people write them for torch: each trains what torch trains, or ends in an error that says what to write."""

import copy
import logging
import subprocess
import sys
import warnings

import pytest
import torch
import torch.utils.checkpoint
import training
from pitfalls_test import Blocks, Checkpointed, CheckpointedReentrant, refused
from ranks import on_one, on_two
from torch import nn
from training import config, squared_error, vector_batches

import ebb

X, Y = vector_batches(1, 1)[0][0]
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def settings(**more):
    return config(optimizer=SGD, gradient_clipping=0, **more)


def same(engine, plain):
    for name, value in plain.state_dict().items():
        assert torch.allclose(engine.gather(name), value, atol=2e-6), name


@on_two
def test_steps_count_the_backwards_that_there_were():
    model = Blocks()
    plain = copy.deepcopy(model)
    engine = ebb.initialize(model, settings(gradient_accumulation_steps=2))
    engine.backward(squared_error(model, (X, Y)))
    assert not engine.step()
    refused(engine.step, "without a backward")
    model(X)
    refused(engine.step, "without a backward")
    engine.drop()
    for _ in range(2):  # two backwards and one step() are a step, too
        engine.backward(squared_error(model, (X, Y)))
    assert engine.step()
    squared_error(plain, (X, Y)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(engine, plain)
    plain.zero_grad()
    engine.backward(squared_error(model, (X, Y)))  # one of two, whose mean it is
    assert not engine.step() and engine.step(now=True)
    squared_error(plain, (X, Y)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(engine, plain)
    engine.close()


class _InTwoParts(nn.Module):
    """A reentrant checkpoint has a backward of its own, so that the weight's gradient comes from each of the two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True)
        return x


@on_two
def test_a_large_gradient_goes_to_the_engine_before_the_next_one_comes():
    """One to which the trainer has a hook is there for it, and one that comes in two parts is their sum."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(3)])
    model.append(_InTwoParts())
    plain = copy.deepcopy(model)
    engine = ebb.initialize(model, settings(gradient_accumulation_steps=2))
    first, last = model[1][0].weight, model[1][2].weight
    are_gone, norms = [], []
    first.register_hook(lambda gradient: are_gone.append(last.grad is None))
    model[2][0].weight.register_post_accumulate_grad_hook(lambda parameter: norms.append(parameter.grad.norm().item()))
    x = torch.randn(4, 512)
    for scale in (1.0, 2.0):
        engine.backward((scale * model(x)).square().mean())
        engine.step()
        (scale * plain(x)).square().mean().div(2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(engine, plain)
    assert are_gone == [True, True] and len(norms) == 2 and all(norms)
    engine.close()


@pytest.mark.parametrize("resets", ["optimizer", "model"])
@on_two
def test_a_gan_of_two_engines(resets):
    torch.manual_seed(0)
    g, d = Blocks(), Blocks()
    g.head = nn.Linear(8, 8)
    pg, pd = copy.deepcopy(g), copy.deepcopy(d)
    of_g, of_d = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (pg, pd))
    g_engine = ebb.initialize(g, settings(), name="g")
    d_engine = ebb.initialize(d, settings(gradient_accumulation_steps=2), name="d")
    for _ in range(3):
        {"optimizer": d_engine.optimizer, "model": d}[resets].zero_grad()
        fake = g(X)
        g_engine.zero_grad()  # a forward whose backward is to come stays
        for x in (X + 1, fake.detach()):
            d_engine.backward(d(x).square().mean())
            d_engine.step()
        g_engine.backward(-d(fake).mean())
        g_engine.step()

        of_d.zero_grad()
        fake = pg(X)
        ((pd(X + 1).square().mean() + pd(fake.detach()).square().mean()) / 2).backward()
        of_d.step()
        of_g.zero_grad()
        (-pd(fake).mean()).backward()
        of_g.step()
    d_engine.zero_grad()
    same(g_engine, pg)
    same(d_engine, pd)
    g_engine.close()
    d_engine.close()


@on_one
def test_a_backward_too_many_says_what_to_write():
    model = Blocks()
    engine = ebb.initialize(model, settings())
    squared_error(model, (X, Y)).backward()
    refused(lambda: model(X), "gradient_accumulation_steps to the number of backwards")
    engine.drop()
    squared_error(model, (X, Y)).backward()
    assert engine.step()
    engine.close()
    engine = ebb.initialize(model := Blocks(), settings(), example=(X,))
    hidden = model.blocks[0](X)
    engine._walk.settle()
    for _ in range(2):
        hidden = model.blocks[0](hidden)
    with pytest.raises(ebb.Error) as caught:
        engine.backward(hidden.mean())
        engine.step()
    assert "ModelSpec" not in str(caught.value)
    engine.close()


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedReentrant])
@on_one
def test_an_evaluation_under_checkpoints_begins_no_step(kind):
    model = kind()
    engine = ebb.initialize(model, settings())
    for _ in range(2):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(X.clone())
        assert not engine._steps.in_step
        engine.backward(squared_error(model, (X.clone(), Y)))
        assert engine.step()
    engine.close()


@on_one
def test_a_forward_after_one_that_failed_asks_for_drop():
    model = Blocks()
    engine = ebb.initialize(model, settings())
    engine.backward(squared_error(model, (X, Y)))
    engine.step()
    fails = model.blocks[1].register_forward_pre_hook(lambda module, arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(X)
    fails.remove()
    refused(lambda: model(X), r"ended with ZeroDivisionError.*Call drop\(\)")
    refused(engine.step, r"Call drop\(\)")
    engine.drop()
    engine.backward(squared_error(model, (X, Y)))
    assert engine.step()
    engine.close()


@pytest.mark.parametrize("optimizer", [SGD, training.ADAMW])
@on_one
def test_schedulers_that_cycle_the_momentum(optimizer):
    model = Blocks()
    engine = ebb.initialize(model, config(optimizer=optimizer))
    kinds = torch.optim.lr_scheduler
    makes = (
        lambda **more: kinds.CyclicLR(engine.optimizer, base_lr=0.1, max_lr=0.3, step_size_up=2, **more),
        lambda **more: kinds.OneCycleLR(engine.optimizer, max_lr=0.1, total_steps=10, **more),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a step of the schedule before one of the optimizer
        for make in makes:
            refused(lambda: make().step(), "keeps the configuration's.*cycle_momentum=False")
        warnings.simplefilter("error")
        for make in makes:
            schedule = make(cycle_momentum=False)
            for _ in range(2):
                engine.backward(squared_error(model, (X, Y)))
                engine.optimizer.step() if optimizer is SGD else engine.step()
                schedule.step()
    engine.close()


@on_one
def test_a_scheduler_goes_on_after_its_state_was_loaded():
    model = Blocks()
    warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 10}}
    engine = ebb.initialize(model, settings(scheduler=warmup))
    engine.learning_rate = 0.2
    engine.backward(squared_error(model, (X, Y)))
    engine.step()
    engine.learning_rate = 0.1  # that of the configuration, and driven all the same
    state = copy.deepcopy(engine.optimizer.state_dict())
    engine.close()
    engine = ebb.initialize(model := Blocks(), settings(scheduler=warmup))
    engine.optimizer.load_state_dict(state)
    engine.backward(squared_error(model, (X, Y)))
    engine.step()
    assert engine.report().learning_rate == 0.1
    engine.close()


@on_one
def test_other_dtypes_are_said_and_an_fp16_loss_is_scaled_in_fp32():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logging.getLogger("ebb").addHandler(handler)
    logging.getLogger("ebb").setLevel(logging.INFO)
    engine = ebb.initialize(Blocks().double(), settings())
    engine.close()
    assert said == [("WARNING", "parameters of torch.float64 are computed in torch.float32, and updated in torch.float32")]
    said.clear()
    model = Blocks()
    model.blocks[1].requires_grad_(False)
    ebb.initialize(model, settings(bf16={"enabled": True})).close()
    assert said == [
        ("INFO", "parameters of torch.float32 are computed in torch.bfloat16, and updated in torch.float32"),
        ("WARNING", "frozen parameters are rounded to torch.bfloat16, because they have no master: blocks.1.weight, blocks.1.bias"),
    ]
    values = []
    for scale in (1024, 65536):  # the latter is no number of fp16
        model = Blocks()
        engine = ebb.initialize(model, settings(fp16={"enabled": True, "loss_scale": scale}))
        loss = ((model(X.half()) - Y.half()) / 16).square().mean()
        assert loss.dtype == torch.float16
        engine.backward(loss)
        engine.step()
        assert engine.report().applied
        values.append(torch.cat([value.flatten() for value in engine.state_dict().values()]))
        engine.close()
    assert (values[1] - values[0]).abs().max() < 1e-4


@on_one
def test_losses_of_all_dtypes_are_counted():
    model = Blocks()
    engine = ebb.initialize(model, settings())
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        loss = squared_error(model, (X, Y)).to(dtype)
        engine.backward(loss)
        engine.step()
        assert engine.report().loss == pytest.approx(loss.item(), rel=1e-6)
    for loss, text in ((model(X), r"the shape \[2, 1\]"), (model(X).sum() * 1j, "the loss is a tensor of torch.complex64"), (0.5, "the loss is a float"),
                       (model(X).sum().detach(), "needs no gradient")):
        refused(lambda: engine.backward(loss), text, "INVALID_ARGUMENT")
    engine.close()


@on_one
def test_what_schedulers_read_and_groups_that_come_later():
    from transformers import get_scheduler

    engine = ebb.initialize(Blocks(), settings())
    plain = torch.optim.SGD(Blocks().parameters(), lr=0.1)
    rates = []
    for optimizer in (engine.optimizer, plain):
        schedule = get_scheduler("cosine_with_min_lr", optimizer, 0, 10, scheduler_specific_kwargs={"min_lr": 0.01})
        rates.append([schedule.step() or schedule.get_last_lr() for _ in range(4)])
    assert rates[0] == rates[1]
    refused(lambda: engine.optimizer.add_param_group({"params": [nn.Parameter(X)]}), "groups=", "UNIMPLEMENTED")
    engine.close()
    with torch.inference_mode():
        model = Blocks()
        refused(lambda: ebb.initialize(model, settings()), "under torch.inference_mode")
    refused(lambda: ebb.initialize(model, settings()), "'blocks.0.weight' was made under torch.inference_mode")


@on_one
def test_clipping_by_the_loop_is_refused():
    from torch.nn.utils import clip_grad_norm_  # before the engine, and so by its own name

    model, plain = Blocks(), Blocks()
    engine = ebb.initialize(model, settings())
    engine.backward(squared_error(model, (X, Y)))
    refused(lambda: clip_grad_norm_(model.parameters(), 1.0), 'gradient of .* Set "gradient_clipping"')
    engine.close()
    squared_error(plain, (X, Y)).backward()
    clip_grad_norm_(plain.parameters(), 0.01)
    assert clip_grad_norm_(plain.parameters(), 1.0) == pytest.approx(0.01, rel=1e-3)


@on_one
def test_averages_of_parameters_and_states_of_torch_are_refused():
    """Of torch's, with which a loop would get NaN, or begin again without momenta."""
    model, plain = Blocks(), Blocks()
    average = torch.optim.swa_utils.AveragedModel(model)
    engine = ebb.initialize(model, settings())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for one, step in ((model, engine.step), (plain, optimizer.step)):
        squared_error(one, (X, Y)).backward()
        step()
    refused(lambda: average.update_parameters(model), r"'blocks.0.weight' is read by .*state_dict\(\)")
    torch.optim.swa_utils.AveragedModel(plain).update_parameters(plain)
    refused(lambda: engine.optimizer.load_state_dict(optimizer.state_dict()), "another optimizer's states.*engine.load", "UNIMPLEMENTED")
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    same(engine, plain)
    engine.close()


@on_one
def test_a_scaler_and_clipping_by_value_are_refused():
    model, plain = Blocks(), Blocks()
    engine = ebb.initialize(model, settings(), example=(X,))
    for scaler in (torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)):
        scaler.scale(squared_error(model, (X, Y))).backward()
        if scaler.is_enabled():
            refused(lambda: scaler.unscale_(engine.optimizer), "the gradient of 'blocks.0.weight' is changed by .*unscale_")
            refused(lambda: scaler.step(engine.optimizer), r"GradScaler.step\(\): .* without a GradScaler")
            engine.drop()
        else:
            refused(lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1), "clip_grad_value_.*'blocks.0.weight'.*by norm only")
            scaler.step(engine.optimizer)
    assert engine.report().applied
    engine.close()
    squared_error(plain, (X, Y)).backward()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-4)
    assert max(parameter.grad.abs().max() for parameter in plain.parameters()) <= 1e-4


@on_one
def test_a_parameter_that_comes_later_is_named():
    model = Blocks()
    engine = ebb.initialize(model, settings(), example=(X,))
    model.blocks[1] = nn.Linear(8, 8)
    for call in (lambda: model(X), engine.step, engine.state_dict, lambda: engine.load_state_dict(Blocks().state_dict())):
        refused(call, "'blocks.1.weight' came into the model after ebb.initialize")
    engine.close()
    model = Blocks()
    engine = ebb.initialize(model, settings(), example=(X,))
    model.gain = nn.Parameter(torch.ones(8))
    refused(lambda: model(X), "'gain' came into the model after ebb.initialize")
    del model.gain
    engine.backward(squared_error(model, (X, Y)))
    model.gain = nn.Parameter(torch.ones(8))
    refused(engine.step, "'gain' came into the model after ebb.initialize")
    del model.gain
    engine.drop()
    engine.backward(squared_error(model, (X, Y)))
    assert engine.step() and engine.report().applied
    engine.close()


def test_a_forked_child_neither_computes_nor_ends_the_run():
    done = subprocess.run([sys.executable, "-c", """
import os, sys, torch, ebb
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
engine = ebb.initialize(model, {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: model(torch.ones(1, 4)), engine.memory, engine.traffic, engine.communication, engine.zero_grad):
        try:
            call()
        except ebb.Error as error:
            refused += "forked" in str(error)
    from ebb import _world as inner
    inner._world = (inner._world[0], inner._world[1]._replace(size=2))
    inner.library.ebb_world_fail = lambda *arguments: os._exit(9)
    sys.last_value = ValueError()
    inner._close_all()
    os._exit(7 if refused == 5 else refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
engine.backward(model(torch.ones(1, 4)).sum())
assert engine.step()
"""], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
