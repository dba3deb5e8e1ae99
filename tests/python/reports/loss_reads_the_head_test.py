"""A loss that reads a parameter of a closed unit, and so NaN: an error names it at the first NaN, also if autograd does not see the parameter."""

import pytest
import torch
import torch.nn.functional as F
from modules import Blocks
from training import SGD, compare, squared_error

import ebb


def _frozen():
    model = Blocks()
    model.head.requires_grad_(False)
    return model


def _logits(model, weight, batch):
    x, y = batch
    return F.linear(model(x).expand(len(x), 8), weight)


def of_linear(model, batch):
    return _logits(model, model.head.weight, batch).square().mean()


def detached(model, batch):
    return _logits(model, model.head.weight.detach(), batch).square().mean()


def cast(model, batch):
    hidden = model(batch[0]).expand(len(batch[0]), 8)
    return F.linear(hidden, model.head.weight.data.double().float()).square().mean()


def added(model, batch):
    return (model(batch[0]) + model.head.weight).square().mean()


def within_a_device(model, batch):
    with torch.device("cpu"):
        output = model(batch[0])
    return (output * model.head.weight).square().mean()


def _is_named(place):
    batch = place.batches()[0][0]
    for make, loss_of in ((_frozen, of_linear), (Blocks, detached), (_frozen, cast), (_frozen, added), (_frozen, within_a_device)):
        for by_engine in (True, False):
            model = make()
            engine = ebb.initialize(model, place.config(gradient_clipping=0))
            with pytest.raises(ebb.Error, match=r"the loss is NaN because 'head.weight' was read by \w+ outside of its unit, at .*loss_reads"):
                loss = loss_of(model, batch)
                engine.backward(loss) if by_engine else loss.backward()
                engine.step()
            engine.drop()
            engine.close()
            assert torch._C._len_torch_function_stack() == 0


def test_the_parameter_is_named_at_the_first_nan(at):
    at(_is_named)


def _later(place):
    """In a later step without a report, in the first of two micro-batches."""
    batch = place.batches()[0][0]
    for by_engine in (True, False):
        model = _frozen()
        engine = ebb.initialize(model, place.config(gradient_accumulation_steps=2))

        def train(loss):
            engine.backward(loss) if by_engine else loss.backward()
            return engine.step()

        for _ in range(8):
            train(model(batch[0]).square().mean())
        with pytest.raises(ebb.Error, match="'head.weight' was read by linear outside of its unit"):
            assert train(of_linear(model, batch)) is False
            train(model(batch[0]).square().mean())
        engine.drop()
        for _ in range(2):
            train(model(batch[0]).square().mean())
        assert engine.report().applied
        engine.close()


def test_a_read_in_a_later_step_is_named_without_a_report(at):
    at(_later)


BEFORE = {
    "clone": lambda weight: weight.detach().clone(),
    "to": lambda weight: weight.to(torch.bfloat16).float(),
    "norm": lambda weight: weight / weight.norm(),
}


def _before_the_forward(place, is_late):
    """`is_late`: in the fourth step, behind an evaluation."""
    batch = place.batches()[0][0]
    for read, value_of in BEFORE.items():
        for by_engine in (True, False):
            model = _frozen()
            engine = ebb.initialize(model, place.config())
            for _ in range(3 if is_late else 0):
                loss = squared_error(model, batch)
                engine.backward(loss) if by_engine else loss.backward()
                engine.step()
            with pytest.raises(ebb.Error, match=rf"'head.weight' was read by \w*{read}\w* outside of its unit, at .*loss_reads"):
                if is_late:
                    with torch.no_grad():
                        model(batch[0])
                loss = _logits(model, value_of(model.head.weight), batch).square().mean()
                engine.backward(loss) if by_engine else loss.backward()
                engine.step()
            engine.close()
            assert torch._C._len_torch_function_stack() == 0


def test_a_read_before_the_forward_is_named(at):
    at(_before_the_forward, False)


def test_a_read_between_an_evaluation_and_the_forward_is_named(at):
    at(_before_the_forward, True)


def _harmless_before(place):
    """A number that is only printed. With two micro-batches, and after a dropped step."""
    batch = place.batches()[0][0]
    model = _frozen()
    engine = ebb.initialize(model, place.config(gradient_accumulation_steps=2))
    model(batch[0]), engine.drop()
    for _ in range(6):
        assert model.head.weight.norm().isnan()
        engine.backward(model(batch[0]).square().mean()), engine.step()
    assert engine.report().applied
    engine.close()
    assert torch._C._len_torch_function_stack() == 0


def test_a_read_for_no_loss_is_no_error(at):
    at(_harmless_before)


def _is_right(place):
    batches = place.batches()
    harmless = lambda model, batch: model(batch[0]).square().mean() * model.head.weight.shape[1] / model.head.weight.numel()
    compare(_frozen, batches, harmless, place.config(optimizer=SGD), optimizer=SGD)
    for loss_of in (of_linear, detached, cast):
        compare(_frozen, batches, loss_of, place.config(optimizer=SGD), optimizer=SGD, resident=["head.weight"])
    compare(_frozen, batches, of_linear, place.config(optimizer=SGD), optimizer=SGD, example=lambda model: of_linear(model, batches[0][0]))


def test_a_resident_head_has_the_numbers_of_torch(at):
    at(_is_right)
