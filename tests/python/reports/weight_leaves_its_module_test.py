"""A module returns its own weight, or a view of it, and another module uses that later: a learned query, a tied table, a hypernetwork."""

import pytest
import torch
from modules import Blocks
from ranks import on_places
from torch import nn
from training import SGD, compare, squared_error

import ebb


def through(of_weight):
    """A model whose last product is with `of_weight`(the first block's weight), after eleven other blocks have run."""

    class First(nn.Linear):
        def forward(self, x):
            return super().forward(x), of_weight(self.weight)

    class Model(Blocks):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.blocks = nn.ModuleList([First(8, 8)] + [nn.Linear(8, 8) for _ in range(11)])

        def forward(self, x):
            x, weight = self.blocks[0](x)
            for block in self.blocks[1:]:
                x = torch.tanh(block(x))
            return self.head(x @ weight)

    return Model


class Tokens(Blocks):
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.Parameter(torch.ones(1, 8) / 2)

        def forward(self, x):
            return self.values.expand(len(x), -1)

    def __init__(self):
        super().__init__()
        self.tokens = self.Learned()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(12)])

    def forward(self, x):
        tokens = self.tokens(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x * tokens)


VIEWS = {
    "transposed": lambda weight: weight.t(), "detached": lambda weight: weight.detach(), "data": lambda weight: weight.data,
    "a part": lambda weight: weight[:, :4].repeat(1, 2), "itself": lambda weight: weight,
}


def _settings(place):
    few = {"stage3_max_live_parameters": 150, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}  # units take turns in memory
    settings = place.config(optimizer=SGD)
    settings["zero_optimization"].update(few)
    return settings


@on_places
def test_a_weight_that_a_module_returns(place):
    batches = place.batches(2)
    shown = batches[0][0][0]
    for name, view in VIEWS.items():
        compare(through(view), batches, squared_error, _settings(place), optimizer=SGD, example=(shown,))
        if name == "a part":
            continue  # repeat() copies within the unit
        engine = ebb.initialize(model := through(view)(), _settings(place))
        with pytest.raises(ebb.Error, match="'blocks.0.weight' is used outside of its module: name it in resident="):
            model(shown)
        engine.close()
    compare(through(lambda weight: weight.clone()), batches, squared_error, _settings(place), optimizer=SGD)
    compare(Tokens, batches, squared_error, _settings(place), optimizer=SGD, example=(shown,))


@on_places
def test_a_view_that_no_example_has_shown(place):
    """A model that does not run without values, so that no walk sees the view."""

    class Model(through(lambda weight: weight.t())):
        def forward(self, x):
            return x if x.sum().item() == 3 else super().forward(x)

    engine = ebb.initialize(model := Model(), _settings(place))
    with pytest.raises(ebb.Error, match=r"'blocks.0' gives a view of its parameter 'blocks.0.weight' to other modules.*clone\(\)"):
        model(place.batches(1)[0][0][0])
    engine.close()
    compare(Model, place.batches(2), squared_error, _settings(place), optimizer=SGD, resident=["blocks.0.weight"])


def keeping(of_weight):
    class Keeps(nn.Linear):
        def forward(self, x):
            KEPT[:] = [of_weight(self.weight)]
            return super().forward(x)

    class Model(Blocks):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Keeps(8, 8)] + [nn.Linear(8, 8) for _ in range(11)])

    return Model


KEPT = []


@pytest.mark.skipif(not hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg"), reason="this torch cannot forbid memory for a while")
@on_places
def test_a_view_that_a_module_keeps(place):
    batches = place.batches(2)
    for name in ("transposed", "detached", "data"):
        engine = ebb.initialize(model := keeping(VIEWS[name])(), _settings(place))
        for of_step in batches:
            loss = squared_error(model, of_step[engine.world.rank])
            with pytest.raises(RuntimeError, match="'blocks.0.weight' has no value here, nor has a view of it"):
                loss + KEPT[0].pow(2).sum()
            engine.backward(loss)
            engine.step()
        engine.close()

    def with_penalty(model, batch):
        return squared_error(model, batch) + KEPT[0].pow(2).sum()

    for same in (lambda weight: weight.t().pow(2), lambda weight: weight.clone()):
        compare(keeping(same), batches, with_penalty, _settings(place), optimizer=SGD, example=lambda model: with_penalty(model, batches[0][0]))
