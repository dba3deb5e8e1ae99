"""torch.set_default_device(): tensors that the engine makes for itself are where it needs them."""

import tempfile

import torch
from modules import Blocks
from ranks import on_places
from training import SGD, squared_error, with_torch

import ebb


class Counts(Blocks):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@on_places
def test_another_default_device(place):
    batches = place.batches(2)
    model, plain = Counts(), Counts()
    losses = with_torch(plain, batches, squared_error, SGD, clip=1e9)
    torch.set_default_device("meta")  # stands for a GPU: a tensor that goes there by chance has no memory here
    try:
        engine = ebb.initialize(model, place.config(optimizer=SGD, gradient_clipping=0))
        for of_step, loss in zip(batches, losses):
            engine.backward(squared_error(model, of_step[engine.world.rank]))
            engine.step()
            assert abs(engine.report().loss - loss) < 1e-5
        values = engine.state_dict()
        for name, value in plain.named_parameters():
            assert torch.allclose(values[name], value, atol=1e-6), name
        if engine.world.size == 1:
            with tempfile.TemporaryDirectory() as folder:
                engine.save(folder)
                engine.load(folder)
        engine.load_state_dict(values)
        assert all(torch.equal(value, values[name]) for name, value in engine.state_dict().items())
        engine.close()
    finally:
        torch.set_default_device(None)
