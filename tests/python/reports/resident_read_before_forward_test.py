"""A resident parameter that a loop reads before the model's forward, as CLIP's temperature or a penalty."""

import ebb
import pytest
import torch
from ranks import on_one, on_two
from torch import nn

from training import compare, config, vector_batches


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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", [_temperature_first, _temperature_after, _penalty_first], ids=lambda loss: loss.__name__)
@on_one
def test_the_loss_has_the_values_of_the_last_update(loss, accumulate):
    ranks = ebb.world().size
    batches = vector_batches(4, ranks * accumulate)
    settings = config(gradient_accumulation_steps=accumulate)
    compare(Scaled, batches, loss, settings=settings, accumulate=accumulate)


@on_one
def test_a_log_between_steps_shows_the_updated_value():
    engine = ebb.initialize(model := Scaled(), config())
    for (batch,) in vector_batches(3, 1):
        engine.backward(_temperature_after(model, batch))
        engine.step()
        assert model.scale.item() == engine.gather("scale").item()
    engine.close()


@on_two
def test_on_several_ranks_it_is_an_error():
    engine = ebb.initialize(model := Scaled(), config())
    ((batch,),) = vector_batches(1, 1)
    for _ in range(2):
        engine.backward(_temperature_after(model, batch))
        engine.step()
    with torch.no_grad(), pytest.raises(ebb.Error, match=r"'scale' is read by item before the model's forward.*engine.gather\('scale'\) on every"):
        model.scale.item()
    with pytest.raises(ebb.Error, match="'scale' is read by exp before the model's forward.*value of the forward before"):
        _temperature_first(model, batch)
    engine.backward(_temperature_after(model, batch))
    engine.step()
    engine.close()


@on_one
def test_an_operator_that_hides_the_nan_is_refused():
    engine = ebb.initialize(model := Scaled(), config())
    weight = model.blocks[1].weight
    for hides in (lambda: weight > 0, lambda: torch.nan_to_num(weight), lambda: weight.count_nonzero(), lambda: weight.argmax()):
        with pytest.raises(ebb.Error, match="'blocks.1.weight' is read by .* outside of its unit"):
            hides()
    engine.close()
