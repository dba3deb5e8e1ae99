"""count_activations against the most that torch's own tensors take on the CPU: within 5%, or refused by name."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from training import config

import ebb


class Rnn(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(32, 32, batch_first=True, **options)

    def forward(self, x):
        return self.rnn(x)[0]


class Layers(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def loss_of(model, x):
    return model(x).square().mean()


def peak_of_torch(model, x):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        loss_of(model, x).backward()
    allocations = [event for event in run.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("make", [lambda: Rnn(nn.GRU), lambda: Rnn(nn.GRU, num_layers=2, bidirectional=True), lambda: Rnn(nn.RNN),
                                  lambda: Layers(True), lambda: Layers(False)], ids=["GRU", "two-way GRU", "RNN", "reentrant", "not reentrant"])
def test_the_count_is_torchs_peak(make):
    model, x = make(), torch.randn(32, 64, 32)
    counted = ebb.count_activations(model, config(), 1, example=lambda model: loss_of(model, x)).peak
    assert counted == pytest.approx(peak_of_torch(model, x), rel=0.05)


def test_an_rnn_with_a_workspace_is_refused_by_name():
    with pytest.raises(ebb.Error, match="nn.LSTM.* runs as aten::mkldnn_rnn_layer cannot be counted") as caught:
        ebb.count_activations(Rnn(nn.LSTM), config(), 1, example=torch.randn(32, 64, 32))
    assert caught.value.code == "UNIMPLEMENTED"
    assert ebb.count_activations(Rnn(nn.GRU), config(), 1, example=torch.randn(32, 64, 32)).peak > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN's kernels need a GPU")
def test_an_rnn_on_a_gpu_is_refused_by_name():
    with pytest.raises(ebb.Error, match="aten::_cudnn_rnn cannot be counted"):
        ebb.count_activations(Rnn(nn.GRU).cuda(), config(), 1, example=torch.zeros(32, 64, 32, device="cuda"), device="cuda")
