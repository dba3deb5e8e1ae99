"""The user trained a complex parameter: the error names the way that works, and it works."""

import copy

import pytest
import torch
from ranks import on_ranks
from torch import nn
from training import SGD, config, offloaded, vector_batches, with_engine, with_torch

import ebb


class Spectral(nn.Module):
    def __init__(self, is_real):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        weight = torch.randn(5, dtype=torch.complex64)
        self.filter = nn.Parameter(torch.view_as_real(weight).clone() if is_real else weight)

    def forward(self, x):
        weight = self.filter if self.filter.is_complex() else torch.view_as_complex(self.filter)
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * weight, n=8))


def _loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)
@on_ranks
def test_as_real_numbers_it_trains_like_torch(folder):
    with pytest.raises(ebb.Error, match=r"'filter' is torch.complex64.* nn.Parameter\(torch.view_as_real\(values\)\)"):
        ebb.initialize(Spectral(False), config())
    model, batches = Spectral(True), vector_batches(3, 2)
    plain = copy.deepcopy(model)
    settings = config(optimizer=SGD, zero=offloaded(folder) if ebb.world().size > 1 else {})
    mine = batches if ebb.world().size > 1 else [of_step[:1] for of_step in batches]
    expected = with_torch(plain, mine, _loss, SGD)
    losses, values = with_engine(model, mine, _loss, settings, after=lambda engine: engine.state_dict())
    assert all(abs(ours - theirs) < 1e-5 for ours, theirs in zip(losses, expected))
    assert torch.allclose(values["filter"], plain.filter, atol=1e-5)
