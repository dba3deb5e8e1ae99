"""What programs do beside training: they evaluate, fail, have several engines, and ask."""

import copy
import io
import logging

import loops
import pytest
import torch
import training
from ranks import on_one, on_ranks, on_two

both = pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)


def _batches(steps, each=1):
    import ebb

    world = ebb.world()
    return [of_step[world.rank * each :][:each] for of_step in training.vector_batches(steps, each * world.size)]


@on_one
def test_the_log_of_deepspeed_says_which_of_the_two_runs():
    logger, said = loops.deepspeed().utils.logger, io.StringIO()
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    loops.begin(training.mlp()).destroy()
    logger.removeHandler(handler)
    assert "DeepSpeed info: " in said.getvalue() and "Ebb" in said.getvalue()


@both
@on_ranks
def test_evaluation_counts_nothing():
    model, other = loops.pair()
    engine, plain = loops.begin(model, loops.config(accumulate=2)), loops.begin(other, loops.config(accumulate=2))
    x = torch.randn(3, 8)
    for of_step in _batches(3, 2):
        for number, batch in enumerate(of_step):
            engine.eval()
            with torch.no_grad():
                first = engine(x)
            with torch.inference_mode():
                assert torch.equal(engine(x), first)
            forgotten = engine(x)  # with gradients, and no backward follows
            assert forgotten.requires_grad and torch.equal(forgotten, first)
            if number == 0:  # between micro-batches the next forward has to be one that trains
                with torch.no_grad():
                    engine(x)
            engine.train()
            for one in (engine, plain):
                one.backward(training.squared_error(one, batch))
                one.step()
    ours, theirs = engine.module_state_dict(), plain.module_state_dict()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-6), name
    engine.destroy(), plain.destroy()


@both
@on_ranks
def test_training_goes_on_after_an_exception():
    model, other = loops.pair()
    engine, plain = loops.begin(model), loops.begin(other)
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ebb").addHandler(handler)
    for number, (batch,) in enumerate(_batches(4)):
        if number == 1:
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                engine(torch.zeros(2, 5))
        if number == 2:
            loss = training.squared_error(engine, batch)
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
        for one in (engine, plain):
            one.backward(training.squared_error(one, batch))
            one.step()
    logging.getLogger("ebb").removeHandler(handler)
    assert sum("that step is dropped, and training goes on" in line for line in said) == 2
    ours, theirs = engine.module_state_dict(), plain.module_state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    engine.destroy(), plain.destroy()


@on_one
def test_an_exception_after_other_micro_batches_is_no_silent_loss_of_their_gradients():
    import ebb

    engine = loops.begin(training.mlp(), loops.config(accumulate=2))
    (batch, other), = _batches(1, 2)
    engine.backward(training.squared_error(engine, batch)), engine.step()
    with pytest.raises(RuntimeError):
        engine(torch.zeros(2, 5))
    with pytest.raises(ebb.Error, match="after 1 backward.s. of the step, whose gradients are lost"):
        engine(other[0])
    engine.optimizer.zero_grad()
    engine.backward(training.squared_error(engine, other)), engine.step()
    engine.destroy()


@both
@on_ranks
def test_two_engines_train_a_gan():
    torch.manual_seed(3)
    models = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)), torch.nn.Linear(8, 1)]
    plain = copy.deepcopy(models)
    engines = [loops.begin(model, loops.config(gradient_clipping=0.0), loops.sgd) for model in models]
    generator, critic = engines
    for (x, _), in _batches(3):
        fake = generator(x)
        critic.backward(critic(fake.detach()).square().mean() - critic(x).mean()), critic.step()
        generator.backward(-critic(fake).mean()), generator.step()
        critic.optimizer.zero_grad()  # of what the generator's loss has left there
    optimizers = [loops.sgd(model.parameters()) for model in plain]
    for of_step in training.vector_batches(3, generator.world_size):
        x = torch.cat([x for x, _ in of_step])
        fake = plain[0](x)
        for optimizer, loss in (
            (optimizers[1], lambda: plain[1](fake.detach()).square().mean() - plain[1](x).mean()), (optimizers[0], lambda: -plain[1](fake).mean())
        ):
            for one in optimizers:
                one.zero_grad()
            loss().backward()
            optimizer.step()
    for engine, other in zip(engines, plain):
        values = engine.module_state_dict()
        for name, value in other.state_dict().items():
            assert torch.allclose(values[name], value, atol=1e-6), name
        engine.destroy()


@both
@pytest.mark.parametrize("stage, forwards", [(3, 2), (3, 3), (1, 2)])
@on_ranks
def test_several_forwards_for_one_backward(stage, forwards):
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(stage))
    other = loops.adamw(plain.parameters())
    for number, of_step in enumerate(training.vector_batches(4, forwards * engine.world_size)):
        count = forwards if number != 2 else 1  # one step has fewer than the first
        own = of_step[forwards * engine.global_rank :][:count]
        loss = sum(training.squared_error(engine, batch) for batch in own)
        engine.backward(loss), engine.step()
        of_all = [batch for rank in range(engine.world_size) for batch in of_step[forwards * rank :][:count]]
        expected = sum(training.squared_error(plain, batch) for batch in of_all) / engine.world_size
        loops.check([loops.mean_over_ranks(loss)], [expected.item()], 2e-6)
        expected.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        other.step(), other.zero_grad()
    assert engine.ebb.forwards_max == forwards
    engine.destroy()


@both
@on_ranks
def test_a_second_engine_takes_the_model_over_with_its_values():
    model = training.mlp()
    first = loops.begin(model)
    loops.train(first, training.vector_batches(2, first.world_size))
    values = first.module_state_dict()
    second = loops.begin(model, loops.config(2), loops.sgd)
    assert all(torch.equal(value, values[name]) for name, value in second.module_state_dict().items())
    loops.train(second, training.vector_batches(1, second.world_size))
    second.destroy()


@both
@on_ranks
def test_a_model_without_an_optimizer_is_sharded_and_frozen():
    model, plain = loops.pair()
    engine, optimizer, _, _ = loops.deepspeed().initialize(model=model, config=loops.config())
    x = torch.randn(2, 8)
    assert optimizer is None and torch.allclose(engine(x), plain(x), atol=1e-6) and not engine(x).requires_grad
    needs = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="an input needs a gradient"):
        engine(needs)
    with torch.no_grad():
        engine(needs)
    with pytest.raises(AssertionError, match="must provide optimizer during init"):
        engine.backward(torch.zeros((), requires_grad=True))
    with pytest.raises(AssertionError, match="must provide optimizer during init"):
        engine.step()
    engine.destroy()


@on_one
def test_below_stage_3_a_model_without_an_optimizer_stays_as_it_is():
    model = training.mlp()
    model.register_buffer("frequencies", torch.tensor([0.1]))
    engine, optimizer, _, _ = loops.deepspeed().initialize(model=model, config=loops.config(2, bf16={"enabled": True}))
    assert model.frequencies.dtype == torch.float32
    assert optimizer is None and engine.ebb is None and engine(torch.zeros(1, 8).bfloat16()).dtype == torch.bfloat16


@on_one
def test_what_no_group_has_is_frozen():
    model = training.mlp()
    bias = model[0].bias
    made = lambda parameters: torch.optim.SGD([one for one in parameters if one is not bias], lr=0.1)
    engine = loops.begin(model, make=made)
    before = engine.module_state_dict()
    loops.train(engine, training.vector_batches(1, 1))
    after = engine.module_state_dict()
    assert not bias.requires_grad and torch.equal(before["0.bias"], after["0.bias"]) and not torch.equal(before["0.weight"], after["0.weight"])
    engine.destroy()


class Subclass(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


_OWN = {
    "subclass": lambda p: Subclass(p, lr=0.01), "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0), "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True), "maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, maximize=True),
}


@both
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("make", _OWN)
@on_ranks
def test_the_code_of_other_optimizers_updates_the_shards(make, stage):
    model, plain = loops.pair()
    theirs = _OWN[make](plain.parameters())
    schedules = []
    def halved(optimizer):
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step))
        return schedules[-1]

    engine = loops.begin(model, loops.config(stage, accumulate=2, zero={"offload_optimizer": {"device": "cpu"}}), make=_OWN[make], lr_scheduler=halved)
    batches = training.vector_batches(4, 2 * engine.world_size)
    losses, norms = loops.train_with_torch(plain, batches, theirs, schedule=halved(theirs))
    loops.check(loops.train(engine, batches, 2), losses)
    assert engine.get_global_grad_norm() == pytest.approx(norms[-1], rel=1e-5) and engine.get_lr() == [theirs.param_groups[0]["lr"]]
    engine.destroy()


@both
@on_ranks
def test_an_optimizer_of_torchs_by_its_name_in_the_json_is_resumed(folder):
    settings = lambda stage: loops.config(stage, optimizer={"type": "RAdam", "params": {"lr": 0.01, "betas": [0.8, 0.9]}})
    engine = loops.begin(training.mlp(), settings(3), make=None)
    batches = training.vector_batches(6, engine.world_size)
    loops.train(engine, batches[:3])
    engine.save_checkpoint(folder)
    rest = loops.train(engine, batches[3:])
    again = loops.begin(training.mlp(), settings(3), make=None)
    again.load_checkpoint(folder)
    assert loops.train(again, batches[3:]) == rest
    engine.destroy(), again.destroy()


@pytest.mark.parametrize("make, said", [
    (lambda p: torch.optim.Adafactor(p), "Adafactor"), (lambda p: torch.optim.LBFGS(p), "LBFGS cannot update slices"),
], ids=["Adafactor", "LBFGS"])
def test_optimizers_that_look_at_whole_tensors_are_refused(make, said):
    import ebb

    with pytest.raises(ebb.Error, match=said) as caught:
        loops.begin(training.mlp(), make=make)
    assert caught.value.code == "UNIMPLEMENTED"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_two
def test_after_an_error_of_one_rank_all_have_counted_the_same_steps(dtype):
    import ebb

    is_half = dtype == "bf16"
    more = {"bf16": {"enabled": True}} if is_half else {}
    halves = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = loops.begin(training.mlp(), loops.config(2, **more), lr_scheduler=halves)
    failed = 0
    for number, of_step in enumerate(training.vector_batches(5, 2)):
        x, y = (one.bfloat16() if is_half else one for one in of_step[engine.global_rank])
        if number == 2 and engine.global_rank == 1:
            x = x[:, :3]  # a shape that the first layer refuses
        try:
            engine.backward((engine(x) - y).square().mean())
            engine.step()
        except (ebb.Error, RuntimeError):
            failed += 1
    every = [None, None]
    torch.distributed.all_gather_object(every, (engine.global_steps, engine.global_samples, engine.get_lr(), failed))
    assert every[0] == every[1] == (4, 16, [0.01 * 0.5**4], 1)
    engine.destroy()


@on_one
def test_a_momentum_that_changes_is_refused():
    import ebb

    engine = loops.begin(training.mlp())
    loops.train(engine, training.vector_batches(1, 1))
    engine.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    with pytest.raises(ebb.Error, match="param_groups.i..'betas'. became .0.5, 0.9."):
        loops.train(engine, training.vector_batches(1, 1))
    engine.destroy()


@pytest.mark.parametrize("more", [
    {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["x"]}}, {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
    {"optimizer": {"type": "OneBitAdam"}}, {"optimizer": {"type": "Muon"}},
], ids=str)
def test_keys_that_would_change_numbers_are_refused(more):
    import ebb

    with pytest.raises(ebb.Error) as caught:
        loops.deepspeed().initialize(model=training.mlp(), config=loops.config(**more))
    assert caught.value.code == "UNIMPLEMENTED"


@on_one
def test_a_parameter_that_is_used_outside_of_its_module_is_kept_whole():
    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
            self.head = torch.nn.Linear(8, 1)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.head(x) + self.layers[0].weight.sum()

    model, plain = loops.pair(Reads)
    engine = loops.begin(model)
    batches = training.vector_batches(4, 1)
    loops.check(loops.train(engine, batches), loops.train_with_torch(plain, batches, loops.adamw(plain.parameters()))[0])
    engine.destroy()


@both
@on_ranks
def test_moments_are_read_and_whole_parameters_are_written():
    deepspeed = loops.deepspeed()
    model, plain = loops.pair()
    engine = loops.begin(model)
    other = loops.adamw(plain.parameters())
    batches = training.vector_batches(2, engine.world_size)
    loops.train(engine, batches), loops.train_with_torch(plain, batches, other)
    weight, expected = model[0].weight, plain[0].weight
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.allclose(deepspeed.utils.safe_get_full_optimizer_state(weight, key), other.state[expected][key], atol=1e-6)
    assert torch.allclose(deepspeed.utils.safe_get_full_fp32_param(weight), expected, atol=1e-5)
    deepspeed.utils.safe_set_full_fp32_param(weight, torch.ones(8, 8))
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), torch.ones(8, 8))
    engine.destroy()


@both
@on_ranks
def test_gathered_parameters_show_values_and_take_the_changes_of_one_rank():
    deepspeed = loops.deepspeed()
    model, plain = loops.pair()
    engine = loops.begin(model)
    weight = model[0].weight
    with deepspeed.zero.GatheredParameters([weight, model[2].weight], modifier_rank=0):
        assert torch.equal(weight, plain[0].weight) and weight.norm() > 0
        with pytest.raises(RuntimeError, match="cannot be nested"), deepspeed.zero.GatheredParameters([model[4].weight, weight]):
            pass
        with deepspeed.zero.GatheredParameters(model[4].weight):  # the refused context has left nothing
            pass
        if engine.global_rank == 0:
            with torch.no_grad():
                weight.mul_(2)
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert torch.equal(weight, 2 * plain[0].weight) and torch.equal(model[2].weight, plain[2].weight)
        weight.data.zero_()  # no rank is the modifier: nothing is written
    assert torch.equal(engine.ebb.gather("0.weight"), 2 * plain[0].weight)
    loops.train(engine, training.vector_batches(2, engine.world_size))
    engine.destroy()


@on_one
def test_no_sync_is_for_stages_0_and_1():
    engine = loops.begin(training.mlp(), loops.config(3))
    with pytest.raises(AssertionError, match="incompatible"), engine.no_sync():
        pass
    engine.destroy()
    engine = loops.begin(training.mlp(), loops.config(1, accumulate=2))
    (batch, other), = _batches(1, 2)
    with engine.no_sync():
        engine.backward(training.squared_error(engine, batch))
        with pytest.raises(AssertionError, match="illegal to call Engine.step"):
            engine.step()
        with pytest.raises(AssertionError, match="reentry"), engine.no_sync():
            pass
        with pytest.raises(AssertionError, match="nested"), engine.coalesce_grad_reduction():
            pass
    engine.destroy()


@on_one
def test_the_engine_has_what_the_model_has():
    model = training.mlp()
    model.vocabulary = 7
    engine = loops.begin(model)
    assert engine.vocabulary == 7 and type(engine) is loops.deepspeed().DeepSpeedEngine and engine.module is model
    assert [name for name, _ in engine.named_parameters()][0] == "module.0.weight"
    with pytest.raises(AttributeError, match="neither Ebb's DeepSpeedEngine nor Sequential has an attribute 'nonsense'"):
        engine.nonsense
    engine.offload_states()
    assert engine.ebb.is_suspended
    engine.reload_states()
    loops.train(engine, training.vector_batches(1, 1))
    engine.destroy()


@on_one
def test_the_groups_are_saved_with_the_optimizer_and_states_are_not_taken():
    import ebb

    engine = loops.begin(training.mlp())
    state = engine.optimizer.state_dict()
    engine.optimizer.param_groups[0]["lr"] = 0.5
    engine.optimizer.load_state_dict(state)
    assert engine.get_lr() == [0.01]
    with pytest.raises(ebb.Error, match="load_checkpoint"):
        engine.optimizer.load_state_dict({**state, "state": {0: 1}})
    with pytest.raises(ValueError, match="2 parameter groups, and the optimizer has 1"):
        engine.optimizer.load_state_dict({"param_groups": 2 * state["param_groups"]})
    engine.destroy()


@on_one
def test_the_client_optimizer_itself_trains_nothing_and_says_so():
    import ebb

    model = training.mlp()
    client = loops.adamw(model.parameters())
    engine = loops.deepspeed().initialize(model=model, optimizer=client, config=loops.config())[0]
    with pytest.raises(ebb.Error, match="the engine updates"):
        client.step()
    engine.destroy()


@both
@on_ranks
def test_a_model_is_written_whole(folder):
    settings = loops.config(zero={"stage3_gather_16bit_weights_on_model_save": True})
    model, plain = loops.pair()
    engine = loops.begin(model, settings)
    assert engine.save_16bit_model(folder) is True
    if engine.global_rank == 0:
        values = torch.load(f"{folder}/pytorch_model.bin")
        assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is None) == (engine.global_rank != 0)
    engine.destroy()
    engine = loops.begin(training.mlp())
    assert engine.save_16bit_model(folder) is False
    engine.destroy()


class _Buffers(torch.nn.Module):
    _keep_in_fp32_modules_strict = ["bias_*"]
    _keep_in_fp32_modules = ["scale"]

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 1)
        for name in ("bias_of_router", "scale", "other"):
            self.register_buffer(name, torch.tensor([1.0]).bfloat16())
        self.inner.register_buffer("scale", torch.tensor([1.0]).bfloat16())


@pytest.mark.parametrize("kind, types, kept", [
    ("bf16", {}, {"bias_of_router"}), ("fp16", {}, {"bias_of_router", "scale", "inner.scale"}), ("bf16", {"keep_in_fp32_modules": []}, set()),
    ("bf16", {"keep_in_fp32_modules": ["inner*"], "buffer_dtype": "fp16"}, {"inner.scale"}), ("fp32", {"buffer_dtype": "fp16"}, set()),
], ids=["auto bf16", "auto fp16", "none", "patterns", "fp32"])
@on_one
def test_listed_buffers_stay_in_fp32_beside_parameters_of_the_configured_type(kind, types, kept):
    other = torch.float16 if "buffer_dtype" in types and kind != "fp32" else torch.bfloat16
    more = {} if kind == "fp32" else {kind: {"enabled": True}}
    engine = loops.begin(_Buffers(), loops.config(data_types=types, **more))
    assert {name: one.dtype for name, one in engine.module.named_buffers()} == {
        name: torch.float32 if name in kept else other for name in ("bias_of_router", "scale", "other", "inner.scale")
    }
    computed = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
    assert {one.dtype for one in engine.module.parameters()} == {computed}
    engine.destroy()


@on_one
def test_a_schedule_without_its_optimizer_is_deepspeeds_assertion():
    model = training.mlp()
    schedule = torch.optim.lr_scheduler.LambdaLR(loops.adamw(model.parameters()), lambda step: 1.0)
    for optimizer, of_json in ((loops.adamw, {}), (None, {"optimizer": {"type": "AdamW"}})):
        with pytest.raises(AssertionError, match="Client LR Scheduler is instantiated"):
            loops.deepspeed().initialize(
                model=model, optimizer=optimizer, model_parameters=model.parameters(), lr_scheduler=schedule, config=loops.config(**of_json)
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_one
def test_the_step_of_the_optimizer_updates_and_counts_nothing(stage):
    model, plain = loops.pair()
    halves = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = loops.begin(model, loops.config(stage, accumulate=2), lr_scheduler=halves)
    other = loops.adamw(plain.parameters())
    zero, optimizers = loops.deepspeed().runtime.zero, loops.deepspeed().runtime.base_optimizer
    kinds = [optimizers.DeepSpeedOptimizer, zero.stage_1_and_2.DeepSpeedZeroOptimizer, zero.stage3.DeepSpeedZeroOptimizer_Stage3]
    assert type(engine.optimizer) is kinds[(stage + 1) // 2] and isinstance(engine.optimizer, torch.optim.Optimizer)
    assert isinstance(engine.optimizer, optimizers.ZeROOptimizer) == (stage > 0)
    batches = training.vector_batches(2, 2)
    for of_step in batches:
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(training.squared_error(engine, of_step[0]))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(training.squared_error(engine, of_step[1]))
        engine.optimizer.step()
    loops.train_with_torch(plain, batches, other)
    assert (engine.global_steps, engine.micro_steps, engine.get_lr(), engine.lr_scheduler.last_epoch) == (0, 0, [0.01], 0)
    assert engine.get_global_grad_norm() > 0 and engine.was_step_applied() and not engine.optimizer.overflow
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(values[name], value, atol=1e-6), name
    engine.destroy()


@both
@on_ranks
def test_at_stage_3_the_optimizer_steps_between_micro_batches_with_the_gradients_so_far():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(accumulate=3))
    other = loops.adamw(plain.parameters())
    ranks = engine.world_size
    for number, of_step in enumerate(training.vector_batches(4, 3 * ranks)):
        mine = of_step[engine.global_rank * 3 :][:3]
        for micro in range(3):
            engine.backward(training.squared_error(engine, mine[micro]))
            if number % 2 == 0 and micro == 0:  # the gradients after it begin anew
                engine.optimizer.step()
            engine.step()
        firsts, rest = of_step[::3], [batch for at, batch in enumerate(of_step) if at % 3]
        for batches in (firsts, rest) if number % 2 == 0 else (of_step,):
            for batch in batches:
                (training.squared_error(plain, batch) / 3 / ranks).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            other.step()
            other.zero_grad()
    assert (engine.global_steps, engine.micro_steps) == (4, 12)
    for name, value in engine.module_state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=1e-6), name
    engine.destroy()


@pytest.mark.parametrize("zero", [{"stage": stage} for stage in (0, 1, 2)] + [{"stage": 3, "offload_optimizer": {"device": "cpu"}}])
@on_one
def test_where_deepspeed_lacks_gradients_between_micro_batches_the_optimizer_does_not_step(zero):
    import ebb

    engine = loops.begin(training.mlp(), loops.config(accumulate=2, zero=zero))
    (of_step,) = training.vector_batches(1, 2)
    engine.backward(training.squared_error(engine, of_step[0]))
    with pytest.raises(ebb.Error, match="between the micro-batches of a step: call engine.step"):
        engine.optimizer.step()
    engine.step()
    engine.backward(training.squared_error(engine, of_step[1]))
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@both
@on_ranks
def test_hooks_are_taken_off_while_whole_values_are_used():
    deepspeed = loops.deepspeed()
    model, plain = loops.pair()
    engine = loops.begin(model)
    other = loops.adamw(plain.parameters())
    x = torch.randn(3, 8)
    for of_step in training.vector_batches(3, engine.world_size):
        loops.check(loops.train(engine, [of_step]), loops.train_with_torch(plain, [of_step], other)[0])
        offload = engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
            for parameter in offload.module.parameters():
                parameter.ds_active_sub_modules.clear()
            assert not list(offload.module.ds_external_parameters())
            for hook in offload.forward_hooks + offload.backward_hooks:
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
            if engine.global_rank == 0:  # alone: the engine does not see it
                assert torch.allclose(offload.module(x), plain(x), atol=1e-5)
            offload._register_deepspeed_module(offload.module)
        with deepspeed.runtime.zero.unwrap_model_for_generation(engine) as whole, torch.no_grad():
            assert torch.allclose(whole.module(x), plain(x), atol=1e-5)
    engine.destroy()


@both
@on_ranks
def test_states_are_offloaded_by_the_optimizer_and_the_next_forward_takes_them_back():
    from ebb.deepspeed.zero import OffloadDeviceEnum, OffloadStateTypeEnum as States

    assert States.optim_states == "optim_states"
    engine, plain = loops.begin(training.mlp()), loops.begin(training.mlp())
    for number, of_step in enumerate(training.vector_batches(3, engine.world_size)):
        include = [States.optim_states, States.hp_params, States.contiguous_grad_buffer]
        engine.optimizer.offload_states(include=include, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
        engine.empty_partition_cache()
        assert engine.ebb.is_suspended
        if number == 1:
            engine.optimizer.reload_states(non_blocking=True)
            assert not engine.ebb.is_suspended
        assert loops.train(engine, [of_step]) == loops.train(plain, [of_step])
    engine.destroy(), plain.destroy()


@both
@on_ranks
def test_a_second_backward_through_one_forward_is_an_error_and_training_goes_on():
    engine, plain = loops.begin(training.mlp()), loops.begin(training.mlp())
    for number, (batch,) in enumerate(_batches(3)):
        if number == 1:
            loss = training.squared_error(engine, batch)
            engine.backward(loss, retain_graph=True)
            with pytest.raises(RuntimeError):
                engine.backward(loss)
            engine.optimizer.zero_grad()
        for one in (engine, plain):
            one.backward(training.squared_error(one, batch))
            one.step()
    ours, theirs = engine.module_state_dict(), plain.module_state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    engine.destroy(), plain.destroy()


@on_one
def test_the_group_of_all_ranks_is_an_attribute_of_the_engine():
    engine = loops.begin(training.mlp())
    assert engine.data_parallel_group is loops.deepspeed().comm.get_world_group()
    engine.destroy()


class _Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.head = torch.nn.Linear(8, 1)
        self.chosen = 0

    def forward(self, x):
        return self.head(torch.tanh(self.experts[self.chosen](x)))


@pytest.mark.parametrize("way", ["class", "name", "suffix", "json"])
@on_two
def test_ranks_may_use_other_modules_of_a_leaf(way):
    utils = loops.deepspeed().utils
    model, plain = loops.pair(_Experts)
    if way == "class":
        with pytest.raises(ValueError, match="No modules of type"):
            utils.set_z3_leaf_modules(model, [torch.nn.Conv2d])
        assert utils.set_z3_leaf_modules(model, ["torch.nn.modules.container.ModuleList"]) == utils.set_z3_leaf_modules(model, [torch.nn.ModuleList])
    elif way == "name":
        assert utils.set_z3_leaf_modules_by_name(model, ["experts", "none"], raise_if_not_found=False) == ([model.experts], ["none"])
    elif way == "suffix":
        with pytest.raises(ValueError, match="none"):
            utils.set_z3_leaf_modules_by_suffix(model, ["none"])
        assert utils.set_z3_leaf_modules_by_suffix(model, ["perts"])[0] == [model.experts]
    engine = loops.begin(model, loops.config(3, zero={"leaf_module": {"classes": "ModuleList"}} if way == "json" else None))
    assert utils.get_z3_leaf_modules(model) == [model.experts]
    other = loops.adamw(plain.parameters())
    for number, of_step in enumerate(training.vector_batches(3, 2)):
        model.chosen = (engine.global_rank + number) % 3
        engine.backward(training.squared_error(engine, of_step[engine.global_rank])), engine.step()
        for rank, batch in enumerate(of_step):
            plain.chosen = (rank + number) % 3
            (training.squared_error(plain, batch) / 2).backward()
        for one in plain.parameters():
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        other.step(), other.zero_grad()
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(values[name], value, atol=1e-5), name
    engine.destroy()


def test_groups_without_experts_stay_as_they_are():
    utils = loops.deepspeed().moe.utils
    parameter = torch.nn.Parameter(torch.zeros(1))
    group = {"params": [parameter], "name": "all"}
    assert utils.split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert utils.split_params_into_different_moe_groups_for_optimizer((group,)) == [group] and not utils.is_moe_param(parameter)
