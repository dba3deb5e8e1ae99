"""Layers are left out or scaled with random numbers of Python and numpy: the walk that shows the order takes none of them."""

import random

import numpy
import torch
from modules import Blocks
from training import SGD, squared_error, with_torch

import ebb


class Scaled(Blocks):
    def forward(self, x):
        return super().forward(x * random.random() * float(numpy.random.rand()) * torch.rand(()))


def _seed(seed):
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)


def _seeded(place):
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


def test_random_numbers_of_python_and_numpy(at):
    at(_seeded)
