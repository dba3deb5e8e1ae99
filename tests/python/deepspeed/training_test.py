"""deepspeed.initialize by hand trains as plain torch."""

import json
import math

import loops
import pytest
import torch
import training
from ranks import on_one, on_ranks, on_two

both = pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)
CPU = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def _ranks() -> int:
    import ebb

    return ebb.world().size


@both
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("stage, tier", [(0, ""), (1, ""), (2, ""), (2, "cpu"), (3, ""), (3, "cpu"), (3, "nvme")])
@on_ranks
def test_losses_are_those_of_torch(stage, tier, optimizer, folder):
    make = getattr(loops, optimizer)
    model, plain = loops.pair()
    zero = {"": None, "cpu": CPU, "nvme": training.offloaded(folder)}[tier]
    engine = loops.begin(model, loops.config(stage, accumulate=2, zero=zero), make)
    batches = training.vector_batches(5, 2 * _ranks())
    losses = loops.train(engine, batches, accumulate=2)
    expected, norms = loops.train_with_torch(plain, batches, make(plain.parameters()))
    loops.check(losses, expected)
    loops.check([engine.get_global_grad_norm()], norms[-1:], 1e-5)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (5, 10, 20 * _ranks())
    engine.destroy()


@both
@on_ranks
def test_groups_keep_their_own_dicts_and_options():
    def grouped(model):
        decayed = [one for one in model.parameters() if one.dim() > 1]
        others = [one for one in model.parameters() if one.dim() == 1]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 3e-3, "betas": (0.8, 0.9)}], lr=1e-2, weight_decay=0.0)

    model, plain = loops.pair()
    client = grouped(model)
    dicts = list(client.param_groups)
    before = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1.0 / (1 + step))  # made before initialize, over the client's optimizer
    engine, optimizer, _, schedule = loops.deepspeed().initialize(model=model, optimizer=client, lr_scheduler=before, config=loops.config())
    assert all(one is other for one, other in zip(optimizer.param_groups, dicts)) and schedule is before and engine.lr_scheduler is before
    assert isinstance(optimizer, torch.optim.Optimizer)
    other = grouped(plain)
    batches = training.vector_batches(5, _ranks())
    losses = loops.train(engine, batches)
    loops.check(losses, loops.train_with_torch(plain, batches, other, 1.0, torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0 / (1 + step)))[0])
    assert engine.get_lr() == [group["lr"] for group in other.param_groups]
    engine.destroy()


@on_one
def test_a_rate_that_the_loop_sets_before_step_holds_in_that_step():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(gradient_clipping=0.0), loops.sgd)
    other = loops.sgd(plain.parameters())
    for batch in [one for of_step in training.vector_batches(4, 1) for one in of_step]:
        loss, expected = training.squared_error(engine, batch), training.squared_error(plain, batch)
        loops.check([loss.item()], [expected.item()])
        engine.backward(loss), expected.backward()
        for groups in (engine.optimizer.param_groups, other.param_groups):
            groups[0]["lr"] *= 0.5
        engine.step(), other.step(), other.zero_grad()
    engine.destroy()


@pytest.mark.parametrize("kind, of_torch", [
    ({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ({"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ({"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}}, lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
    ({"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True}}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
    ({"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ({"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}, lambda p: torch.optim.AdamW(p, lr=0.01)),  # with the decay of torch's default
    ({"type": "Adagrad", "params": {"lr": 0.05, "lr_decay": 0.1}}, lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1)),
    ({"type": "RMSprop", "params": {"lr": 0.005}}, lambda p: torch.optim.RMSprop(p, lr=0.005)),
], ids=["AdamW", "Adam", "Adam not decoupled", "AdamW is decoupled", "torch_adam", "SGD", "Adagrad", "RMSprop"])
def test_an_optimizer_of_the_json_is_that_of_torch(kind, of_torch, one):
    plain = training.mlp()
    expected, _ = loops.train_with_torch(plain, training.vector_batches(4, 1), of_torch(plain.parameters()))
    assert one.run(_losses_of_json, kind)[0] == pytest.approx(expected, rel=1e-6)


def _losses_of_json(kind):
    model = training.mlp()
    engine, optimizer, loader, schedule = loops.deepspeed().initialize(
        model=model, model_parameters=model.parameters(), config=loops.config(optimizer=kind)
    )
    assert loader is None and schedule is None
    losses = loops.train(engine, training.vector_batches(4, 1))
    engine.destroy()
    return losses


@on_one
def test_a_callable_makes_the_optimizer_and_another_the_schedule():
    model, plain = loops.pair()
    engine, optimizer, _, schedule = loops.deepspeed().initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=loops.sgd, config=loops.config(2),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.5),
    )
    other = loops.sgd(plain.parameters())
    batches = training.vector_batches(4, 1)
    losses = loops.train(engine, batches)
    loops.check(losses, loops.train_with_torch(plain, batches, other, 1.0, torch.optim.lr_scheduler.StepLR(other, 1, 0.5))[0])
    assert schedule.get_last_lr() == [0.05 / 16] and optimizer.param_groups[0]["lr"] == 0.05 / 16
    engine.destroy()


@on_one
def test_a_schedule_of_the_json_drives_the_rate():
    warmup = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}
    model = training.mlp()
    engine = loops.begin(model, loops.config(scheduler=warmup), loops.sgd)
    rates = []
    for of_step in training.vector_batches(6, 1):
        rates += engine.get_lr()
        loops.train(engine, [of_step])
    assert rates == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.075, 0.1], abs=1e-12)
    engine.destroy()


@on_one
def test_the_momentum_of_one_cycle_is_that_of_torch():
    cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3, "decay_step_size": 2, "decay_lr_rate": 0.5}
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(scheduler={"type": "OneCycle", "params": cycle}))
    other = loops.adamw(plain.parameters())
    schedule = loops.deepspeed().runtime.lr_schedules.OneCycle(other, **cycle)
    batches = training.vector_batches(9, 1)
    losses = loops.train(engine, batches)
    loops.check(losses, loops.train_with_torch(plain, batches, other, 1.0, schedule)[0])
    assert engine.optimizer.param_groups[0]["betas"] == other.param_groups[0]["betas"] != (0.9, 0.999)
    engine.destroy()


@on_one
def test_a_schedule_of_the_program_takes_the_place_of_the_json_one_with_its_momentum():
    cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3}
    constant = lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(scheduler={"type": "OneCycle", "params": cycle}), lr_scheduler=constant)
    other = loops.adamw(plain.parameters())
    batches = training.vector_batches(6, 1)
    loops.check(loops.train(engine, batches), loops.train_with_torch(plain, batches, other, 1.0, constant(other))[0])
    engine.destroy()


@both
@on_ranks
def test_a_short_last_step_is_divided_by_the_full_accumulation():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(accumulate=4, gradient_clipping=0.0), loops.sgd)
    world = _ranks()
    batch = training.vector_batches(1, 2 * world)[0]
    for number, micro_batch in enumerate(batch[2 * engine.global_rank : 2 * engine.global_rank + 2]):
        engine.set_gradient_accumulation_boundary(number == 1)
        engine.backward(training.squared_error(engine, micro_batch))
        engine.step()
    for micro_batch in batch:
        (training.squared_error(plain, micro_batch) / 4 / world).backward()
    loops.sgd(plain.parameters()).step()
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(values[name], value, atol=1e-6), name
    engine.destroy()


@both
@on_ranks
def test_loss_backward_is_engine_backward():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(accumulate=2))
    batches = training.vector_batches(4, 2 * _ranks())
    losses = []
    for of_step in batches:
        total = torch.zeros(())
        for batch in of_step[2 * engine.global_rank : 2 * engine.global_rank + 2]:
            loss = training.squared_error(engine, batch)
            loss.backward()
            engine.step()
            total += loss.detach() / 2
        losses.append(loops.mean_over_ranks(total))
    loops.check(losses, loops.train_with_torch(plain, batches, loops.adamw(plain.parameters()))[0])
    engine.destroy()


@both
@on_ranks
def test_several_losses_before_a_boundary_add_up():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config())
    other = loops.adamw(plain.parameters())
    for of_step in training.vector_batches(3, 3 * _ranks()):
        for batch in of_step[3 * engine.global_rank : 3 * engine.global_rank + 3]:
            engine.backward(training.squared_error(engine, batch))
        engine.step()
        for batch in of_step:
            (training.squared_error(plain, batch) / _ranks()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        other.step(), other.zero_grad()
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(values[name], value, atol=1e-5), name
    engine.destroy()


@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-6), ("fp16", 2e-3)])
@on_one
def test_a_step_with_more_backwards_than_the_steps_before_has_the_sum_of_their_gradients(dtype, tolerance):
    model, plain = loops.pair()
    more = {} if dtype == "fp32" else {"fp16": {"enabled": True, "initial_scale_power": 8}}
    engine = loops.begin(model, loops.config(gradient_clipping=0.0, **more), loops.sgd)
    other = loops.sgd(plain.parameters())
    for count, of_step in zip((1, 1, 19, 1), training.vector_batches(4, 19)):
        for batch in of_step[:count]:
            engine.backward(training.squared_error(engine, [one.to(next(model.parameters()).dtype) for one in batch]))
            training.squared_error(plain, batch).backward()
        engine.step()
        norm = torch.nn.utils.get_total_norm([one.grad for one in plain.parameters()]).item()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=10 * tolerance)
        other.step(), other.zero_grad()
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(values[name].float(), value, rtol=tolerance, atol=10 * tolerance), name
    engine.destroy()


@pytest.mark.parametrize("stage, drops", [(0, "both"), (1, "both"), (2, "none"), (3, "optimizer")])
@on_one
def test_zero_grad_between_micro_batches_drops_what_deepspeed_drops(stage, drops):
    for which in ("optimizer", "engine"):
        model, plain = loops.pair()
        engine = loops.begin(model, loops.config(stage, accumulate=2, gradient_clipping=0.0), loops.sgd)
        first, second = training.vector_batches(1, 2)[0]
        engine.backward(training.squared_error(engine, first)), engine.step()
        (engine if which == "engine" else engine.optimizer).zero_grad()
        engine.backward(training.squared_error(engine, second)), engine.step()
        for batch in (second,) if drops in (which, "both") else (first, second):
            (training.squared_error(plain, batch) / 2).backward()
        loops.sgd(plain.parameters()).step()
        values = engine.module_state_dict()
        for name, value in plain.state_dict().items():
            assert torch.allclose(values[name], value, atol=1e-6), (which, name)
        engine.destroy()


@both
@on_ranks
def test_without_managed_accumulation_each_step_is_a_boundary():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(managed_gradient_accumulation=False))
    other = loops.adamw(plain.parameters())
    world = _ranks()
    for count, of_step in zip((1, 20, 3), training.vector_batches(3, 20 * world)):
        assert not engine.is_gradient_accumulation_boundary()
        for call in (lambda: engine.set_gradient_accumulation_boundary(True), engine.coalesce_grad_reduction):
            with pytest.raises(AssertionError, match="managed_gradient_accumulation=False"):
                call()
        of_step = of_step[: count * world]
        for batch in of_step[count * engine.global_rank :][:count]:
            engine.backward(training.squared_error(engine, batch) / count)
        engine.step()
        for batch in of_step:
            (training.squared_error(plain, batch) / len(of_step)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        other.step(), other.zero_grad()
    assert (engine.global_steps, engine.global_samples) == (3, 2 * 24 * world)
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(values[name], value, atol=1e-5), name
    engine.destroy()


@on_two
def test_sum_over_ranks():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(gradient_allreduce_op="sum", gradient_clipping=0.0), loops.sgd)
    batches = training.vector_batches(1, 2)
    loops.train(engine, batches)
    for batch in batches[0]:
        training.squared_error(plain, batch).backward()
    loops.sgd(plain.parameters()).step()
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(values[name], value, atol=1e-6), name
    engine.destroy()


@on_one
def test_another_batch_size_between_steps():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config())
    other = loops.adamw(plain.parameters())
    for accumulate in (1, 3, 20):
        engine.set_train_batch_size(2 * accumulate)
        assert engine.get_batch_info() == (2 * accumulate, 2, accumulate)
        batches = training.vector_batches(1, accumulate, seed=accumulate)
        engine.micro_steps = 0
        loops.check(loops.train(engine, batches, accumulate), loops.train_with_torch(plain, batches, other)[0])
    engine.destroy()


@on_one
def test_fp16_scales_the_loss_and_skips_an_overflow():
    model = training.mlp()
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}
    settings = loops.config(fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, scheduler=warmup)
    engine = loops.begin(model, settings, loops.sgd)
    x, y = training.vector_batches(1, 1)[0][0]
    step = lambda factor: (engine.backward((engine(x.half()) - y.half()).float().square().mean() * factor), engine.step())
    step(1.0)
    norm = engine.get_global_grad_norm()
    assert engine.was_step_applied() and engine.skipped_steps == 0 and engine.cur_scale == 256 and math.isfinite(norm)
    step(float("inf"))
    assert not engine.was_step_applied() and engine.optimizer.overflow and engine.skipped_steps == 1 and engine.global_steps == 2
    assert engine.get_global_grad_norm() == norm and engine.lr_scheduler.last_batch_iteration == 0
    scaled = engine.scale((engine(x.half()) - y.half()).float().square().mean())
    assert engine.cur_scale == 128
    scaled.backward(), engine.step()
    assert engine.was_step_applied() and engine.skipped_steps == 1
    engine.destroy()


@on_one
def test_all_parameters_have_the_type_of_the_json():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1).bfloat16())
    engine = loops.begin(model, loops.config(bf16={"enabled": True}))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert engine.ebb.gather("0.weight", master=True).dtype == torch.float32
    engine.destroy()


@on_one
def test_autocast_of_the_json():
    model = training.mlp()
    engine = loops.begin(model, loops.config(torch_autocast={"enabled": True, "dtype": "bf16"}))
    assert engine(torch.randn(2, 8)).dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    engine.ebb.drop()
    engine.destroy()


@on_one
def test_a_configuration_is_a_path_text_or_an_argument(folder):
    import argparse
    import base64

    text = json.dumps(loops.config(optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    path = f"{folder}/ds_config.json"
    with open(path, "w") as file:
        file.write("// of a user\n" + text[:-1] + ",}")
    parser = loops.deepspeed().add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", path])
    for given in ({"config": path}, {"config_params": base64.urlsafe_b64encode(text.encode()).decode()}, {"args": args}):
        engine = loops.deepspeed().initialize(model=training.mlp(), **given)[0]
        assert engine.get_lr() == [0.1]
        engine.destroy()
    with pytest.raises(AssertionError, match="Not sure how to proceed"):
        loops.deepspeed().initialize(args=args, model=training.mlp(), config=path)
    with pytest.raises(ValueError, match="Duplicate keys"):
        loops.deepspeed().DeepSpeedConfig(base64.urlsafe_b64encode(b'{"a": 1, "a": 2}').decode())


@on_two
def test_the_loader_gives_each_rank_its_part():
    data = [(torch.full((8,), float(number)), torch.zeros(1)) for number in range(10)]
    engine, _, loader, _ = loops.deepspeed().initialize(
        model=training.mlp(), config=loops.config(optimizer={"type": "SGD", "params": {"lr": 0.0}}), training_data=data
    )
    assert len(loader) == 3
    seen = {int(value) for x, _ in loader for value in x[:, 0]}
    assert len(seen) == 5
    repeated = loops.deepspeed().utils.RepeatingLoader(loader)
    assert len([next(repeated) for _ in range(7)]) == 7
    engine._config = loops.deepspeed().DeepSpeedConfig(loops.config(dataloader_drop_last=True))
    assert len(engine.deepspeed_io(data)) == 2
    engine.destroy()
