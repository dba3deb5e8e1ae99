"""Layers are left out or scaled with random numbers of Python, of numpy, or of a generator of the user's own: the walk that shows the order
takes none of them."""

import random

import numpy
import torch
from modules import Blocks
from ranks import on_places
from training import SGD, squared_error, with_torch

import ebb

OF_TORCH, OF_PYTHON, OF_NUMPY, OF_OLD_NUMPY = torch.Generator(), random.Random(), numpy.random.default_rng(), numpy.random.RandomState()


class Scaled(Blocks):
    def forward(self, x):
        return super().forward(x * random.random() * float(numpy.random.rand()) * torch.rand(()))


def _seed(seed):
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)


@on_places
def test_random_numbers_of_python_and_numpy(place):
    batches = [[of_step[0]] * place.ranks for of_step in place.batches()]
    for example in (None, (batches[0][0][0],)):
        plain, model = Scaled(), Scaled()
        _seed(6)
        expected = [loss for of_step in batches for loss in with_torch(plain, [of_step[:1]], squared_error, SGD)]
        engine = ebb.initialize(model, place.config(optimizer=SGD), example=example)
        _seed(6)
        for (batch, *_), loss in zip(batches, expected):
            engine.backward(squared_error(model, batch))
            engine.step()
            assert abs(engine.report().loss - loss) < 1e-5
        engine.close()


def _drawn_by(generator):
    """A block's function with a generator in its closure."""
    return lambda x: x * torch.rand((), generator=generator)


class OwnGenerators(Blocks):
    """A dropout with a generator as its argument; others that the model, a closure, a variable and a list hold."""

    def __init__(self):
        super().__init__()
        self.drops = torch.Generator().manual_seed(1)
        self.numbers = [random.Random(2), numpy.random.default_rng(3)]
        self.scaled = _drawn_by(torch.Generator().manual_seed(4))
        for generator, seed in ((OF_TORCH, OF_TORCH.manual_seed), (OF_PYTHON, OF_PYTHON.seed), (OF_OLD_NUMPY, OF_OLD_NUMPY.seed)):
            seed(5)
        OF_NUMPY.bit_generator.state = numpy.random.default_rng(6).bit_generator.state

    def states(self):
        of_torch = (OF_TORCH, self.drops, self.scaled.__closure__[0].cell_contents)
        of_numpy = (OF_NUMPY, self.numbers[1])
        return [generator.get_state().tolist() for generator in of_torch], [generator.bit_generator.state for generator in of_numpy], [
            OF_PYTHON.getstate(), self.numbers[0].getstate(), OF_OLD_NUMPY.get_state(legacy=False)["state"]["pos"]
        ]

    def forward(self, x):
        x = x * torch.bernoulli(torch.full_like(x, 0.9), generator=self.drops) + torch.empty(8).normal_(generator=OF_TORCH)
        x = self.scaled(x) * self.numbers[0].random() * float(self.numbers[1].random()) * OF_PYTHON.random()
        return super().forward(x * float(OF_NUMPY.random()) * float(OF_OLD_NUMPY.rand()))


class LooksAtValues(OwnGenerators):
    """Fake tensors cannot show its order, so that real ones or an evaluation do."""

    def forward(self, x):
        return super().forward(x if x.sum().item() < 1e9 else -x)


@on_places
def test_generators_of_the_users_own(place):
    batches = [[of_step[0]] * place.ranks for of_step in place.batches()]
    for kind in (OwnGenerators, LooksAtValues):
        for example in (None, (batches[0][0][0],)):
            plain = kind()
            expected = [loss for of_step in batches for loss in with_torch(plain, [of_step[:1]], squared_error, SGD)]
            after = plain.states()
            model = kind()
            if kind is OwnGenerators:
                before = model.states()
                ebb.count_activations(model, place.config(), place.ranks, example=batches[0][0][0])
                assert model.states() == before
            engine = ebb.initialize(model, place.config(optimizer=SGD), example=example)
            for (batch, *_), loss in zip(batches, expected):
                engine.backward(squared_error(model, batch))
                engine.step()
                assert abs(engine.report().loss - loss) < 1e-5
            assert model.states() == after
            engine.close()
