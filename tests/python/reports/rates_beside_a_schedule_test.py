"""Learning rates beside a schedule of the JSON: what is shown is the rate of the next step, what is set holds, two schedules are an error."""

import pytest
import torch
from pitfalls_test import refused
from ranks import on_one, on_places
from training import mlp, squared_error, vector_batches

import ebb

BATCH = vector_batches(1, 1)[0][0]
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}


def _step(engine):
    engine.backward(squared_error(engine.model, BATCH))
    engine.step()
    return engine.report().learning_rate


def _engine(settings, **options):
    groups = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": WARMUP, "ebb": {"parameter_groups": {"biases": {"lr_factor": 3.0}}}}
    return ebb.initialize(mlp(), {**settings, **groups}, groups={"biases": "bias"}, **options)


def _shown(engine):
    return {group["group"]: group["lr"] for group in engine.param_groups}


@on_places
def test_the_rate_that_is_shown_is_that_of_the_next_step(settings, folder):
    engine = _engine(settings)
    held = engine.param_groups[0]
    shown, used = [], []
    for _ in range(7):
        rates = _shown(engine)
        assert rates["biases"] == pytest.approx(3 * rates[""]) and engine.learning_rate == held["lr"]
        assert [dict(group)["lr"] for group in engine.param_groups] == [group.get("lr") for group in engine.param_groups] == list(rates.values())
        assert [group["lr"] for group in engine.optimizer.state_dict()["param_groups"]] == list(rates.values())
        shown.append(rates[""])
        before = {name: engine.gather(name) for name in ("0.weight", "0.bias")}
        used.append(_step(engine))
        assert (rates[""] == 0) == torch.equal(engine.gather("0.weight"), before["0.weight"])
    assert shown == used and used == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1, 0.1])
    engine.backward(squared_error(engine.model, BATCH))
    assert engine.learning_rate == pytest.approx(0.1)  # within a step too
    engine.drop()
    engine.close()
    assert engine.learning_rate == pytest.approx(0.1)

    engine = _engine(settings)
    for _ in range(3):
        _step(engine)
    engine.save(folder + "/run")
    state = engine.optimizer.state_dict()
    engine.close()
    engine = _engine(settings)
    engine.load(folder + "/run")
    assert engine.learning_rate == pytest.approx(0.05)
    engine.optimizer.load_state_dict(state)
    assert [engine.learning_rate, _step(engine), engine.learning_rate] == pytest.approx([0.05, 0.05, 0.075])
    engine.close()


@on_places
def test_a_rate_that_was_set_holds(settings):
    engine = _engine(settings)
    engine.learning_rate = 0.1  # the JSON's own
    assert [_step(engine) for _ in range(3)] == [0.1] * 3 and _shown(engine) == {"": 0.1, "biases": 0.1}
    engine.close()
    engine = _engine(settings)
    for _ in range(3):
        _step(engine)
    shown = _shown(engine)
    engine.param_groups[0]["lr"] = engine.param_groups[0]["lr"]  # what is shown; the other group goes on
    first = engine.param_groups[0]["group"]
    _step(engine)
    for group, rate in _shown(engine).items():
        assert (rate == shown[group]) == (group == first)
    state = engine.optimizer.state_dict()
    engine.close()
    engine = _engine(settings)
    engine.optimizer.load_state_dict(state)
    assert _shown(engine)[first] == shown[first] and sorted(_shown(engine).values())[0] == 0
    _step(engine)
    assert _shown(engine)[first] == shown[first]
    engine.close()


@on_places
def test_a_rate_that_replaces_the_schedule_is_logged_once(settings):
    """A loop with a schedule of its own, which forgot the one of its JSON."""
    lines = []
    ebb.log_to(lambda level, line: lines.append((level, line)))

    def told():
        return [line for level, line in lines if level == "warning" and "instead of the schedule" in line]

    try:
        engine = _engine(settings)
        for step in range(3):
            for group in engine.param_groups:
                assert dict(group)["lr"] == group["lr"]  # to read it is no reason
                group["weight_decay"] = 0.01
            assert told() == []
            _step(engine)
        for step in range(3):
            for group in engine.param_groups:
                group["lr"] = 0.1 / (step + 1)
            assert _step(engine) == pytest.approx(0.1 / (step + 1))
        state = engine.optimizer.state_dict()
        assert len(told()) == 1 and "WarmupLR of the JSON's \"scheduler\"" in told()[0] and told()[0].startswith('param_groups[0]["lr"]')
        engine.close()
        for change in (lambda engine: engine.optimizer.load_state_dict(state), lambda engine: setattr(engine, "learning_rate", 0.1),
                       lambda engine: engine.param_groups[1].update(lr=0.1)):
            lines.clear()
            engine = _engine(settings)
            change(engine)
            assert len(told()) == 1
            engine.close()
        lines.clear()
        engine = ebb.initialize(mlp(), settings)
        engine.learning_rate = 0.2
        torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0)
        assert told() == []
        engine.close()
    finally:
        ebb.log_to(None)
    lines.clear()
    engine = _engine(settings)
    engine.learning_rate = 0.2
    engine.close()
    assert lines == []


@on_one
def test_two_schedules_are_an_error(settings):
    engine = _engine(settings)
    kinds = torch.optim.lr_scheduler
    for make in (
        lambda: kinds.LambdaLR(engine.optimizer, lambda step: 1.0),
        lambda: kinds.OneCycleLR(engine.optimizer, max_lr=0.1, total_steps=10),
        lambda: kinds.CyclicLR(engine.optimizer, base_lr=0.1, max_lr=0.3, cycle_momentum=False),
        lambda: kinds.ReduceLROnPlateau(engine.optimizer),
        lambda: kinds.ConstantLR(engine.optimizer),
        lambda: engine.param_groups[0].setdefault("initial_lr", 0.1),  # as the schedulers of timm
    ):
        refused(make, "two schedules: the JSON has a \"scheduler\"")
    assert _step(engine) == 0 == engine.learning_rate
    engine.close()


@on_one
def test_transformers_trainer_is_told_the_rate(folder):
    import transformers
    from trainer_test import ZERO, Sequences, arguments
    from training import llama

    from ebb.integrations.transformers import Trainer

    asked = []

    class Ask(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, lr_scheduler=None, **more):
            asked.append(lr_scheduler.get_last_lr()[0])

    trainer = Trainer(
        model=llama(), args=arguments(folder, max_steps=5, logging_steps=1, learning_rate=0.1, warmup_steps=4), train_dataset=Sequences(20), callbacks=[Ask()],
        ebb_config={"zero_optimization": ZERO, "scheduler": WARMUP},
    )
    trainer.train()
    assert asked == [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx([0, 0, 0.025, 0.05, 0.075])
    trainer.engine.close()


@on_one
def test_a_schedule_of_training_arguments_beside_that_of_the_json(folder):
    from trainer_test import arguments

    from ebb.integrations.transformers import filled

    def tried(kind, params=(), **more):
        return filled({"scheduler": {"type": kind, "params": dict(params)}}, arguments(folder, **more), 100)

    steps = {"warmup_num_steps": "auto"}
    tried("WarmupLR", steps)
    tried("OneCycle")  # beside the default, "linear"
    for kind, same in (("WarmupLR", "constant_with_warmup"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")):
        assert tried(kind, steps, lr_scheduler_type=same, warmup_steps=4)["scheduler"]["params"] == {"warmup_num_steps": 4}
    differ = "the JSON and TrainingArguments differ"
    for kind, other in (("WarmupLR", "cosine"), ("WarmupDecayLR", "constant"), ("OneCycle", "polynomial"), ("WarmupCosineLR", "cosine_with_restarts")):
        refused(lambda: tried(kind, lr_scheduler_type=other), f"{differ}: 'scheduler.type' is {kind}, but lr_scheduler_type is {other}. Write")
    refused(lambda: tried("WarmupLR", steps, lr_scheduler_kwargs={"num_cycles": 2}), f"{differ}: 'scheduler' is there, but lr_scheduler_kwargs is")
    refused(lambda: tried("OneCycle", warmup_steps=4), "'scheduler.params' of OneCycle has no 'warmup_num_steps', but warmup_steps is 4")
    refused(lambda: tried("WarmupLR", {"warmup_num_steps": 3}, lr_scheduler_type="cosine", warmup_steps=4), "is 3, but warmup_steps is 4; 'scheduler.type'")
    assert "scheduler" not in filled({}, arguments(folder, lr_scheduler_type="cosine", warmup_steps=4), 100)
