"""initialize(values=): initial values from a mapping."""

import pytest
import torch
from ranks import on_one, on_two
from torch import nn
from training import config, mlp, warned

import ebb


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.scale, self.last = nn.Linear(8, 8), nn.Parameter(torch.tensor(3.0)), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("offset", torch.arange(8.0))

    def forward(self, x):
        return self.last(self.first(x)) * self.scale + self.offset


@on_two
def test_ranks_read_their_slices_of_a_mapped_file(folder):
    plain, file = Tied(), f"{folder}/{ebb.world().rank}.pt"
    torch.save({name: value.bfloat16() if name.endswith("weight") else value for name, value in plain.state_dict().items()}, file)
    values = torch.load(file, mmap=True)
    with ebb.empty_parameters():
        model = Tied()
    model.offset.zero_()
    engine = ebb.initialize(model, config(3), values=values)
    for name, value in plain.state_dict().items():
        expected = value.bfloat16().float() if name.endswith("weight") else value
        assert torch.equal(engine.state_dict()[name], expected), name
    engine.close()
    own = ebb.initialize(mlp(), config(3), values=mlp().state_dict())  # instead of values of its own
    own.close()


@on_one
def test_a_mapping_that_does_not_fit_is_named():
    def make(values, **more):
        with ebb.empty_parameters():
            model = mlp()
        return ebb.initialize(model, config(3), values=values, **more)

    values = mlp().state_dict()
    lacks = {name: value for name, value in values.items() if name != "2.bias"}
    with pytest.raises(ebb.Error, match="values= has no '2.bias'"):
        make(lacks)
    with pytest.raises(ebb.Error, match=r"'2.bias' has the shape \[8\], and \[9\] in values="):
        make({**values, "2.bias": torch.zeros(9)})
    with pytest.raises(ebb.Error, match="weights= and values= both"):
        make(values, weights="folder")
    said = warned(lambda: make({**values, "more": torch.zeros(1)}).close())
    assert said == ["values= has tensors that the model does not have: 'more'"]
