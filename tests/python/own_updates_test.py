"""Optimizers of torch's that the JSON has no name for: their own code updates the shards."""


import ebb
import pytest
import torch
from ranks import on_one, on_ranks

from training import config, mlp, squared_error, vector_batches

both = pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)


class Signed(torch.optim.Optimizer):
    """Of a program: an update in Python, with a state of its own shape and a counter that is an int."""

    def __init__(self, params, lr=1e-3, share=0.9):
        super().__init__(params, {"lr": lr, "share": share})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["count"], state["start"] = 0, one.clone()  # its first value is not 0
                state["count"] += 1
                one.sub_(one.grad.sign() * group["lr"] / state["count"])
                one.lerp_(state["start"], 1 - group["share"])


MAKES = {
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-2, weight_decay=0.1),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),  # has a product that is one number
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),  # has a state that begins with the rate
    "AMSGrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "Signed": lambda parameters: Signed(parameters, lr=1e-2),
}
PLACES = {
    "stage 0": {"stage": 0}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
    "RAM": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
}


def _settings(zero, **more):
    made = config(gradient_clipping=1.0, zero_optimization={"stage3_param_persistence_threshold": 0, **zero}, **more)
    made.pop("optimizer", None)
    return made


def _train(engine, model, batches, schedule=None):
    rank, losses = ebb.world().rank, []
    for of_step in batches:
        engine.backward(squared_error(model, of_step[rank]))
        engine.step()
        losses.append(engine.report().loss)
        if schedule is not None:
            schedule.step()
    return losses


def _train_with_torch(model, optimizer, batches, schedule=None):
    losses = []
    for of_step in batches:
        loss = sum(squared_error(model, batch) for batch in of_step) / len(of_step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if schedule is not None:
            schedule.step()
    return losses


def _compare(engine, plain, ours, theirs):
    assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-7)
    for name, value in plain.state_dict().items():
        assert torch.allclose(engine.gather(name), value, rtol=1e-5, atol=2e-6), name


@both
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("make", MAKES)
@on_ranks
def test_its_numbers_are_those_of_torch(make, where):
    model, plain = mlp(), mlp()
    other = MAKES[make](plain.parameters())
    batches = vector_batches(5, ebb.world().size)
    engine = ebb.initialize(model, _settings(PLACES[where]), optimizer=MAKES[make](model.parameters()))
    _compare(engine, plain, _train(engine, model, batches), _train_with_torch(plain, other, batches))
    engine.close()


@both
@on_ranks
def test_groups_have_options_of_their_own_and_schedulers_set_the_rate():
    def groups(of):
        decays = [one for one in of.parameters() if one.dim() > 1]
        return [{"params": decays, "weight_decay": 0.3}, {"params": [one for one in of.parameters() if one.dim() < 2], "lr": 3e-3, "betas": (0.8, 0.9)}]

    model, plain = mlp(), mlp()
    ours, theirs = (torch.optim.Adamax(groups(one), lr=1e-2) for one in (model, plain))
    half = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    engine = ebb.initialize(model, _settings({"stage": 2}), optimizer=ours)
    assert engine.optimizer is ours
    batches = vector_batches(5, ebb.world().size)
    _compare(engine, plain, _train(engine, model, batches, half(ours)), _train_with_torch(plain, theirs, batches, half(theirs)))
    ours.param_groups[0]["weight_decay"] = 0.0
    with pytest.raises(ebb.Error, match=r"'weight_decay'\] became 0.0.*Adamax \"lr\" alone"):
        _train(engine, model, batches)
    engine.close()


@both
@on_ranks
def test_states_are_saved_read_and_loaded_at_another_stage(folder):
    model, other = mlp(), mlp()
    make = lambda of: torch.optim.NAdam(of.parameters(), lr=1e-2)
    batches = vector_batches(6, ebb.world().size)
    engine = ebb.initialize(model, _settings({"stage": 3}, ebb={"reduce_at": "round"}), optimizer=make(model))
    _train(engine, model, batches[:3])
    engine.save(folder)
    at_save = engine.gather("0.weight", state="exp_avg")
    assert at_save.shape == (8, 8) and at_save.abs().max() > 0
    rest = _train(engine, model, batches[3:])
    zero = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
    resumed = ebb.initialize(other, _settings(zero, ebb={"reduce_at": "round"}), optimizer=make(other))
    resumed.load(folder)
    assert torch.equal(resumed.gather("0.weight", state="exp_avg"), at_save)
    assert _train(resumed, other, batches[3:]) == rest
    for name, _ in model.named_parameters():
        assert torch.equal(engine.gather(name, master=True), resumed.gather(name, master=True))
    engine.close(), resumed.close()


class _Failing(torch.optim.SGD):
    updates = 0

    def step(self, closure=None):
        _Failing.updates += 1
        if len(self.param_groups[0]["params"][0]) == 64:  # a slice of the model, and none of the trial
            raise ValueError("no more")
        return super().step(closure)


@on_one
def test_what_cannot_be_is_refused_by_name():
    model = mlp()
    make = lambda optimizer, settings=_settings({"stage": 2}): ebb.initialize(model, settings, optimizer=optimizer)
    refused = lambda match: pytest.raises(ebb.Error, match=match)
    with refused("Adafactor"):
        make(torch.optim.Adafactor(model.parameters()))
    with refused("LBFGS cannot update slices"):
        make(torch.optim.LBFGS(model.parameters()))
    with refused("lacks '0.bias'"):
        make(torch.optim.Adamax([model[0].weight]))
    with refused("not in the model"):
        make(torch.optim.Adamax([*model.parameters(), torch.nn.Parameter(torch.zeros(3))]))
    with refused("are both given"):
        make(torch.optim.Adamax(model.parameters()), {**_settings({"stage": 2}), "optimizer": {"type": "AdamW"}})
    with refused('"scheduler" beside'):
        make(torch.optim.Adamax(model.parameters()), {**_settings({"stage": 2}), "scheduler": {"type": "WarmupLR"}})
    stepped = torch.optim.Adamax(model.parameters())
    model[0].weight.grad = torch.ones(8, 8)
    stepped.step()
    model.zero_grad()
    with refused("has states before"):
        make(stepped)


@on_one
def test_an_error_in_an_update_is_one_of_the_engine():
    model = mlp()
    engine = ebb.initialize(model, _settings({"stage": 2}), optimizer=_Failing(model.parameters(), lr=0.1))
    ((batch,),) = vector_batches(1, 1)
    with pytest.raises(ebb.Error, match="optimizer failed at parameter .* in step 1"):
        for _ in range(3):
            engine.backward(squared_error(model, batch))
            engine.step()
            engine.report()
    engine.close()
