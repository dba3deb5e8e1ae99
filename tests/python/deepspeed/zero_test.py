"""Models that are made within zero.Init, and single values of an engine's state."""

import contextlib
import copy
import ctypes
import gc
import io
import os

import loops
import pytest
import torch
import training
from ranks import on_one, on_ranks, on_two

from ebb._host_file import exchanged

both = pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)


def _within_init(make=training.mlp, **options):
    with loops.deepspeed().zero.Init(config_dict_or_path=loops.config(), **options):
        return make()


@both
@on_ranks
def test_a_model_of_zero_init_trains_as_any_other():
    model, plain = _within_init(), training.mlp()
    parameters, theirs = list(model.parameters()), list(plain.parameters())
    assert [one.ds_shape for one in parameters] == [one.shape for one in theirs] and {one.numel() for one in parameters} == {0}
    with loops.deepspeed().zero.GatheredParameters(parameters):
        assert all(torch.equal(one, other) for one, other in zip(parameters, theirs))
    engine = loops.begin(model)
    assert [one.ds_numel for one in parameters] == [one.numel() for one in theirs]
    batches = training.vector_batches(3, engine.world_size)
    loops.check(loops.train(engine, batches), loops.train_with_torch(plain, batches, loops.adamw(plain.parameters()))[0])
    engine.destroy()


@both
@on_ranks
def test_before_initialize_the_changes_of_one_rank_are_all_ranks():
    deepspeed = loops.deepspeed()
    model, last = _within_init(), deepspeed.comm.get_world_size() - 1
    weight, status = model[0].weight, deepspeed.zero.ZeroParamStatus
    with deepspeed.zero.GatheredParameters({weight, model[2].weight, model[2].bias}, modifier_rank=last):
        assert weight.ds_status == status.AVAILABLE and weight.shape == (8, 8)
        weight.data.fill_(3 if deepspeed.comm.get_rank() == last else 7)  # what the other rank writes is lost
        model[2].weight.data = torch.full((8, 8), 4.0)
        with pytest.raises(RuntimeError, match="cannot be nested"), deepspeed.zero.GatheredParameters(weight):
            pass
    with deepspeed.zero.GatheredParameters(weight):
        weight.data.fill_(9)  # nobody is the modifier
    assert weight.ds_status == status.NOT_AVAILABLE and weight.numel() == 0
    model[4].half()  # the copy follows the type
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert set(weight.flatten().tolist()) == {3} and set(model[2].weight.flatten().tolist()) == {4}
        assert torch.equal(model[4].weight, training.mlp()[4].weight.half())
    engine = loops.begin(model)
    assert set(engine.ebb.gather("0.weight").flatten().tolist()) == {3}
    engine.destroy()


@both
@pytest.mark.parametrize("kind, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@on_ranks
def test_parameters_of_zero_init_have_the_type_of_the_json_and_masters_begin_with_all_digits(kind, dtype):
    deepspeed = loops.deepspeed()
    settings = loops.config(**{kind: {"enabled": True}})
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = training.mlp()
    types, plain = lambda: {one.dtype for one in model.parameters()}, training.mlp()
    assert types() == {dtype}
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert all(torch.equal(one, other.to(dtype)) for one, other in zip(model.parameters(), plain.parameters()))
    with deepspeed.zero.GatheredParameters(model[0].parameters(), modifier_rank=0):
        assert torch.equal(model[0].bias, plain[0].bias)  # what is written there has the type that is kept
        model[0].weight.data.fill_(0.1)
    assert types() == {dtype}
    plain[0].weight.data.fill_(0.1)
    engine = loops.begin(model, settings)
    assert types() == {dtype}
    for one, other in zip(model.parameters(), plain.parameters()):
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(one), other)
    engine.destroy()
    of_keyword = _within_init(dtype=dtype)
    assert {one.dtype for one in of_keyword.parameters()} == {dtype} and of_keyword[0].weight.ds_tensor.dtype == dtype


@on_two
def test_apply_and_the_parameters_of_the_model_itself():
    deepspeed = loops.deepspeed()

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.full((4,), 2.0))
            self.apply(lambda module: isinstance(module, torch.nn.Linear) and torch.nn.init.constant_(module.weight, deepspeed.comm.get_rank()))

    model = _within_init(Scaled)
    tied = deepspeed.zero.Init(module=torch.nn.Linear(3, 3))  # a model that is there already
    assert tied.enabled and model.scale.numel() == 0
    with deepspeed.zero.GatheredParameters(model.parameters()):
        assert set(model.first.weight.flatten().tolist()) == {0} and model.scale.tolist() == [2, 2, 2, 2]


def bytes_alone():
    """Of this process, without files, shared memory, and what malloc keeps of freed tensors."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) * 1024


def _large():
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)])


_LARGE_BYTES = 16 * 1024 * 1024 * 4


@pytest.mark.parametrize("on_disk", [False, True])
@on_two
def test_a_host_has_one_copy_of_a_model(on_disk, folder):
    deepspeed = loops.deepspeed()
    offload = {"offload_param": {"device": "nvme", "nvme_path": folder}} if on_disk else {}
    before = bytes_alone()
    with deepspeed.zero.Init(config_dict_or_path=loops.config(zero=offload)):
        model = _large()
    for layer in model:
        with deepspeed.zero.GatheredParameters(layer.parameters(), modifier_rank=0):
            layer.weight.data.mul_(2)
    assert bytes_alone() - before < _LARGE_BYTES / 4
    file = model[0].weight._ebb_kept.file.file
    assert os.fstat(file.fileno()).st_blocks * 512 == pytest.approx(_LARGE_BYTES, rel=0.01)
    links = os.readlink(f"/proc/self/fd/{file.fileno()}")
    assert links.startswith(folder) if on_disk else links.startswith("/memfd:")
    assert os.listdir(folder) == []  # the file has no name, so that it ends with the processes


@on_two
def test_a_host_without_room_is_an_error_on_every_rank():
    import errno

    import ebb

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before, os.posix_fallocate = os.posix_fallocate, full
    try:
        with pytest.raises(ebb.Error, match="do not fit into memory: No space left"):
            _within_init()
    finally:
        os.posix_fallocate = before


@both
@pytest.mark.parametrize("stage, accumulate, scales", [(1, 2, False), (3, 1, True), (3, 2, False)])
@on_ranks
def test_gradients_are_read_and_written_before_the_step(stage, accumulate, scales):
    deepspeed = loops.deepspeed()
    utils = deepspeed.utils
    model, plain = loops.pair()
    model[0].bias.requires_grad_(False), plain[0].bias.requires_grad_(False)
    more = {"fp16": {"enabled": True, "initial_scale_power": 8}} if scales else {}
    engine = loops.begin(model, loops.config(stage, accumulate, gradient_clipping=0, **more), loops.sgd)
    (batches,) = training.vector_batches(1, accumulate * engine.world_size)
    expected = loops.sgd([one for one in plain.parameters() if one.requires_grad])
    for batch in batches:
        (training.squared_error(plain, batch) / len(batches)).backward()
    for number, batch in enumerate(batches[engine.global_rank * accumulate :][:accumulate]):
        if number:
            engine.step()
        engine.backward(training.squared_error(engine, [one.half() if scales else one for one in batch]).float())
    weight, tolerance = model[0].weight, 1e-2 if scales else 1e-6
    for one, other in zip(model.parameters(), plain.parameters()):
        read = utils.safe_get_full_grad(one)
        assert (read is None) == (other.grad is None)
        assert read is None or (read - other.grad).abs().max() <= tolerance
    part = utils.safe_get_local_grad(weight)
    assert part.shape == (weight.partition_numel() if stage == 3 else -(-64 // engine.world_size),)
    utils.safe_set_full_grad(weight, torch.ones(8, 8))
    utils.safe_set_local_grad(weight, 2 * utils.safe_get_local_grad(weight))
    utils.safe_update_full_grad_vectorized([weight], lambda gradient, of: gradient + 1)
    plain[0].weight.grad = torch.full((8, 8), 3.0)
    engine.step()
    expected.step()
    for one, other in zip(model.parameters(), plain.parameters()):
        value = utils.safe_get_full_fp32_param(one)
        assert value is None or (value - other).abs().max() <= tolerance
    with pytest.raises(RuntimeError, match="between the last backward of a step and step"):
        utils.safe_get_full_grad(weight)
    engine.destroy()


@both
@on_ranks
def test_gradients_of_loss_backward_are_divided_by_the_accumulation_when_they_are_read():
    utils = loops.deepspeed().utils
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(3, 2, gradient_clipping=0), loops.sgd)
    (batches,) = training.vector_batches(1, 2 * engine.world_size)
    for batch in batches:
        (training.squared_error(plain, batch) / len(batches)).backward()
    for number, batch in enumerate(batches[2 * engine.global_rank :][:2]):
        if number:
            engine.step()
        training.squared_error(engine, batch).backward()
    assert all((utils.safe_get_full_grad(one) - other.grad).abs().max() <= 1e-6 for one, other in zip(model.parameters(), plain.parameters()))
    utils.safe_set_full_grad(model[0].weight, torch.ones(8, 8))
    assert torch.equal(utils.safe_get_full_grad(model[0].weight), torch.ones(8, 8))
    plain[0].weight.grad = torch.ones(8, 8)
    engine.step(), loops.sgd(plain.parameters()).step()
    for one, other in zip(model.parameters(), plain.parameters()):
        assert (utils.safe_get_full_fp32_param(one) - other).abs().max() <= 1e-6
    engine.destroy()


@on_one
def test_a_gradient_that_is_read_too_early_is_an_error():
    engine = loops.begin(training.mlp(), loops.config(3, accumulate=2))
    (batches,) = training.vector_batches(1, 2)
    engine.backward(training.squared_error(engine, batches[0]))
    engine.step()
    loops.deepspeed().utils.safe_get_full_grad(engine.module[0].weight)
    with pytest.raises(RuntimeError, match="after the last backward of a step"):
        training.squared_error(engine, batches[1])
    engine.optimizer.zero_grad()
    loops.train(engine, [batches], 2)
    engine.destroy()


@both
@on_ranks
def test_states_are_written_whole_and_by_part():
    utils = loops.deepspeed().utils
    engine = loops.begin(training.mlp())
    loops.train(engine, training.vector_batches(2, engine.world_size))
    weight, other = engine.module[0].weight, engine.module[2].weight
    kept = utils.safe_get_full_optimizer_state(other, "exp_avg")
    value = torch.arange(64.0).view(8, 8)
    utils.safe_set_full_optimizer_state(weight, value, "exp_avg")
    utils.safe_set_local_optimizer_state(weight, 2 * utils.safe_get_local_optimizer_state(weight, "exp_avg"), "exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), 2 * value)
    utils.safe_set_local_fp32_param(weight, utils.safe_get_local_optimizer_state(weight, "exp_avg"))
    assert torch.equal(utils.safe_get_full_fp32_param(weight), 2 * value)
    assert torch.equal(utils.safe_get_full_optimizer_state(other, "exp_avg"), kept)
    with pytest.raises(RuntimeError, match="no state 'velocity'"):
        utils.safe_get_full_optimizer_state(weight, "velocity")
    engine.destroy()


@both
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks
def test_the_optimizer_shows_the_masters_of_this_rank(stage):
    engine = loops.begin(training.mlp(), loops.config(stage, bf16={"enabled": True}))
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    read = lambda: getattr(engine.optimizer, name)
    batches = [[[one.bfloat16() for one in batch] for batch in step] for step in training.vector_batches(2, engine.world_size)]
    for step in batches:
        loops.train(engine, [step])
        (here,) = read()
        masters = [engine.ebb.gather(key, master=True).flatten() for key, _ in engine.module.named_parameters()]
        total = torch.stack([here.double().square().sum(), torch.tensor(here.numel(), dtype=torch.float64)])
        if engine.world_size > 1:
            torch.distributed.all_reduce(total)
        assert total[1] == sum(map(len, masters)) and {one.dtype for one in here} == {torch.float32}
        assert total[0].item() == pytest.approx(torch.cat(masters).double().square().sum().item(), rel=1e-12)
    for write in (lambda one: one.mul_(2), lambda one: one.data.copy_(torch.zeros_like(one)), lambda one: torch._foreach_zero_([one])):
        with pytest.raises(RuntimeError, match="a copy of masters is changed by"):
            write(here)
    assert torch.equal(here, read()[0])
    engine.destroy()
    of_bias = loops.begin(torch.nn.Linear(1, 1), loops.config(stage), lambda all: loops.adamw([{"params": [one]} for one in all]))
    assert sum(exchanged(sum(map(len, getattr(of_bias.optimizer, name))))) == 2  # with two ranks a group may have nothing on one
    of_bias.destroy()


@both
@on_ranks
def test_a_moving_average_over_gathered_parameters():
    deepspeed = loops.deepspeed()
    engine = loops.begin(training.mlp())
    averages = [torch.zeros(one.ds_shape) for one in engine.module.parameters()]
    masters = [torch.zeros(one.ds_shape) for one in engine.module.parameters()]
    for step in training.vector_batches(3, engine.world_size):
        loops.train(engine, [step])
        for average, master, one in zip(averages, masters, engine.module.parameters()):
            hidden = [one] if one.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE else []
            with deepspeed.zero.GatheredParameters(hidden, enabled=bool(hidden)):
                average.lerp_(one.data, 0.1)
            master.lerp_(deepspeed.utils.safe_get_full_fp32_param(one), 0.1)
    assert all(torch.equal(average, master) for average, master in zip(averages, masters)) and averages[0].abs().max() > 0
    engine.destroy()


@both
@pytest.mark.parametrize("stage, dtype", [(0, "bf16"), (1, "fp32"), (2, "bf16"), (3, "bf16")])
@on_ranks
def test_parameters_that_are_whole_show_their_values_between_steps(stage, dtype):
    deepspeed = loops.deepspeed()
    is_half = dtype == "bf16"
    whole = {"stage3_param_persistence_threshold": 100}  # of the largest unit: 72 elements
    engine = loops.begin(training.mlp(), loops.config(stage, zero=whole, **({"bf16": {"enabled": True}} if is_half else {})))
    model, shown = engine.module, lambda: {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    batches = [[[one.bfloat16() if is_half else one for one in batch] for batch in step] for step in training.vector_batches(3, engine.world_size)]
    before = shown()
    for step in batches:
        loops.train(engine, [step])
        values = shown()
        assert not torch.equal(values["0.weight"], before["0.weight"]) and model[0].weight.norm() > 0
        with torch.no_grad():
            engine(step[0][0])  # an evaluation changes nothing
        if engine.global_rank == 0:  # alone
            assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        of_rank_0 = engine.ebb.state_dict(rank=0)
        assert set(of_rank_0) == (set(values) if engine.global_rank == 0 else set())
        for name, value in values.items():
            assert torch.equal(value, engine.ebb.gather(name, master=True).to(value.dtype))
        before = values
    with deepspeed.zero.GatheredParameters(model[2].weight, modifier_rank=0):
        if engine.global_rank == 0:
            model[2].weight.data.fill_(2)
    assert set(model[2].weight.flatten().tolist()) == {2}
    loops.train(engine, batches)
    engine.destroy()


def _pickled(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


_READS = [
    lambda one: one.data, lambda one: one.detach(), lambda one: one.clone(), lambda one: one.view(-1).view(one.shape), lambda one: one.T.T,
    lambda one: one.to(torch.float64).float(), lambda one: torch.as_tensor(one.tolist()), lambda one: torch.from_numpy(one.detach().numpy()),
    lambda one: torch.lerp(torch.zeros(()), one, 1.0), lambda one: torch._foreach_add([one], 0.0)[0], lambda one: torch.nn.Parameter(one), _pickled,
    copy.deepcopy, lambda one: torch.from_dlpack(one.detach()), lambda one: torch.stack([one])[0], lambda one: one[:],
]


@both
@on_ranks
def test_each_way_to_read_a_parameter_brings_its_value_in_on_one_rank_alone():
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(1))
    other = loops.adamw(plain.parameters())
    (of_step,) = training.vector_batches(1, engine.world_size)
    loops.train(engine, [of_step])  # the order of units is learned, and all values are placed again
    loops.train_with_torch(plain, [of_step], other)
    for number, read in enumerate(_READS):
        loops.train(engine, [of_step])
        loops.train_with_torch(plain, [of_step], other)
        assert not any(slots.stays for slots in engine.ebb._slots)  # nobody has looked
        if engine.global_rank != number % engine.world_size:
            continue
        value = read(model[2].weight)
        assert type(model[2].weight) is torch.nn.Parameter and torch.allclose(value, plain[2].weight, atol=1e-5)
        assert "no value" not in repr(model[0].weight) and torch.allclose(model[0].weight, plain[0].weight, atol=1e-5)
    engine.destroy()


@on_one
def test_values_are_brought_in_where_they_are_needed_and_no_read_disturbs_others():
    import ebb

    deepspeed = loops.deepspeed()
    model, plain = loops.pair()
    engine = loops.begin(model, loops.config(2))
    other = loops.adamw(plain.parameters())
    batches = training.vector_batches(4, 1)
    step = lambda at: (loops.train(engine, [batches[at]]), loops.train_with_torch(plain, [batches[at]], other))
    step(0)
    with deepspeed.zero.GatheredParameters(model[2].weight, modifier_rank=0):
        model[2].weight.data.fill_(2)
        assert "0." in repr(model[0].weight) and set(model[2].weight.flatten().tolist()) == {2}  # a read beside it
    assert set(model[2].weight.flatten().tolist()) == {2}
    with torch.no_grad():
        plain[2].weight.fill_(2)
    step(1)
    with torch.no_grad():  # an evaluation that reads what another module has
        x = batches[1][0][0]
        assert torch.allclose(engine(x) + model[0].weight.sum(), plain(x) + plain[0].weight.sum(), atol=1e-5)
    step(2)
    average = [copy.deepcopy(one) for one in model.parameters()]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(average, plain.parameters()))
    loss = training.squared_error(engine, batches[3][0])
    with pytest.raises(ebb.Error, match="'0.weight' is read by"):  # within a step it has none
        model[0].weight.sum()
    with contextlib.suppress(ebb.Error):
        engine.backward(loss)
    engine.optimizer.zero_grad()
    step(3)
    engine.destroy()
    with pytest.raises(ebb.Error, match="after its engine was closed"):
        model[0].weight.sum()


@on_one
def test_a_parameter_shows_its_value_after_a_look_at_all_or_a_part():
    engine, batches = loops.begin(training.mlp(), loops.config(2)), training.vector_batches(1, 1)
    for look in (engine.module_state_dict, engine.module[0].state_dict, engine.ebb.names_of_entries):
        loops.train(engine, batches)
        look()
        assert all(torch.equal(one, engine.ebb.gather(name, master=True)) for name, one in engine.module.named_parameters())
    engine.destroy()


@pytest.mark.parametrize("looks_first", [False, True])
@on_one
def test_a_write_to_a_shown_value_is_an_error(looks_first):
    import ebb

    engine = loops.begin(training.mlp(), loops.config(2))
    loops.train(engine, training.vector_batches(1, 1))
    if looks_first:
        assert engine.module[0].weight.norm() > 0
    with torch.no_grad():
        engine.module[0].weight.add_(1)
    with pytest.raises(ebb.Error, match="has written to '0.weight'"):
        loops.train(engine, training.vector_batches(1, 1))
    engine.destroy()


@on_two
def test_at_stage_3_small_units_alone_show_their_values():
    import ebb

    deepspeed = loops.deepspeed()
    engine = loops.begin(training.mlp(), loops.config(zero={"stage3_param_persistence_threshold": 20}))  # the last unit has 9 elements
    weight, last = engine.module[0].weight, engine.module[6].weight
    batches = training.vector_batches(3, 2)
    before = last.detach().clone()
    for step in batches:
        loops.train(engine, [step])
        if engine.global_rank == 1:  # alone
            assert last.norm() > 0 and not torch.equal(last, before) and isinstance(last.tolist()[0][0], float)
        with pytest.raises(ebb.Error, match="'0.weight' is read by norm outside of its unit.*GatheredParameters.*safe_get_full_fp32_param"):
            weight.norm()
        shown = last.detach().clone()
        assert torch.equal(shown, deepspeed.utils.safe_get_full_fp32_param(last)) and torch.equal(shown, engine.ebb.gather("6.weight"))
        before = shown
    with deepspeed.zero.GatheredParameters([weight, last], modifier_rank=0):
        if engine.global_rank == 0:
            weight.data.fill_(2), last.data.fill_(3)
    assert set(last.flatten().tolist()) == {3} and torch.equal(engine.ebb.gather("0.weight"), torch.full((8, 8), 2.0))
    loops.train(engine, batches)
    engine.destroy()
