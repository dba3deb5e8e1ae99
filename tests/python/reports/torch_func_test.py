"""torch.func.functional_call with the model's own parameters. What else torch.func has is in unsupported_test.py."""

from modules import Blocks
from ranks import on_places
from torch.func import functional_call
from training import compare


@on_places
def test_functional_call_with_the_models_own_parameters(place):
    def loss_of(model, batch):
        x, y = batch
        return (functional_call(model, dict(model.named_parameters()), (x,)) - y).square().mean()

    batches = place.batches()
    for example in (None, lambda model: loss_of(model, batches[0][0])):
        compare(Blocks, batches, loss_of, place.config(), example=example)
