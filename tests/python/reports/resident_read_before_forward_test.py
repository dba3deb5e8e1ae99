"""A resident parameter that a loop reads before the model's forward, as CLIP's temperature or a penalty."""

from concurrent.futures import ThreadPoolExecutor

import ebb
import pytest
import torch
from ranks import on_one, on_ranks
from torch import nn

from training import compare, config, vector_batches

both = pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _temperature_first(model, batch):
    scale = model.scale.exp()
    return (scale * model(batch[0]) - 1).square().mean()


def _temperature_after(model, batch):
    values = model(batch[0])
    return (model.scale.exp() * values - 1).square().mean()


def _penalty_first(model, batch):
    penalty = model.scale.pow(2).sum()
    return model(batch[0]).square().mean() + penalty


@both
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", [_temperature_first, _temperature_after, _penalty_first], ids=lambda loss: loss.__name__)
@on_ranks
def test_the_loss_has_the_values_of_the_last_update(loss, accumulate):
    ranks = ebb.world().size
    batches = vector_batches(4, ranks * accumulate)
    settings = config(gradient_accumulation_steps=accumulate)
    compare(Scaled, batches, loss, settings=settings, accumulate=accumulate)


@both
@on_ranks
def test_one_rank_alone_may_log_the_updated_value():
    engine = ebb.initialize(model := Scaled(), config())
    ranks = ebb.world().size
    for number, of_step in enumerate(vector_batches(4, ranks)):
        engine.backward(_temperature_after(model, of_step[ebb.world().rank]))
        engine.step()
        shown = model.scale.item() if ebb.world().rank == number % ranks else None
        assert shown in (None, engine.gather("scale").item())
    engine.close()


@on_one
def test_another_thread_gets_no_old_value():
    engine = ebb.initialize(model := Scaled(), config())
    engine.backward(_temperature_after(model, vector_batches(1, 1)[0][0]))
    engine.step()
    with ThreadPoolExecutor() as pool, pytest.raises(ebb.Error, match="'scale' is read by item before the model's forward.*the thread that made"):
        pool.submit(lambda: model.scale.item()).result()
    assert model.scale.item() == engine.gather("scale").item()
    engine.close()


@on_one
def test_an_operator_that_hides_the_nan_is_refused():
    engine = ebb.initialize(model := Scaled(), config())
    weight = model.blocks[1].weight
    for hides in (lambda: weight > 0, lambda: torch.nan_to_num(weight), lambda: weight.count_nonzero(), lambda: weight.argmax()):
        with pytest.raises(ebb.Error, match="'blocks.1.weight' is read by .* outside of its unit"):
            hides()
    engine.close()
