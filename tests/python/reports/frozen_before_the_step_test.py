"""A loop freezes parameters between their backward and step(), as the loops of GANs do."""

import torch
from modules import Blocks
from ranks import on_places
from training import squared_error

import ebb


@on_places
def test_the_gradients_count_in_their_step(place):
    for resident in ([], ["head.weight"], [".*"]):
        _as_torch(place.with_sgd(), place.batches(4), resident)


def _as_torch(settings, batches, resident):
    model, plain = Blocks(), Blocks()
    engine = ebb.initialize(model, settings, resident=resident)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for of_step in batches:
        sum(squared_error(plain, batch) / len(of_step) for batch in of_step).backward()
        optimizer.step(), optimizer.zero_grad()
        engine.backward(squared_error(model, of_step[engine.world.rank]))
        model.requires_grad_(False)
        engine.step()
        model.requires_grad_(True)
    for name, value in plain.state_dict().items():
        assert torch.allclose(engine.gather(name), value, atol=2e-6), (name, resident)
    engine.close()
