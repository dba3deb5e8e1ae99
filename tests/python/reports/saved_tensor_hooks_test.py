"""Saved-tensor hooks around the model: a store that knows a tensor by its address, torch's save_on_cpu, the engine's own offload."""

import warnings

import pytest
import torch
from modules import Blocks, Checkpointed
from pitfalls_test import refused
from ranks import on_one, on_places
from torch import nn
from training import squared_error, vector_batches

import ebb
from ebb._saved_tensors import SavedInRam


class _ByAddress(torch.autograd.graph.saved_tensors_hooks):
    """Keeps one copy for each address, and the tensor itself, so that torch gives its memory to no other."""

    def __init__(self):
        self.kept = {}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor):
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        if key not in self.kept:
            self.kept[key] = tensor, tensor.clone()
        return key

    def _unpack(self, key):
        return self.kept[key][1]


class _Noting(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.addresses = set()

    def forward(self, x):
        self.addresses.add(self.weight.data_ptr())
        return super().forward(x)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(8, 8), _Noting()

    def forward(self, x):
        return x + self.above(torch.tanh(self.below(x)))


def _equal_blocks():
    torch.manual_seed(1)
    return nn.Sequential(*[_Block() for _ in range(6)], nn.Linear(8, 1))


def _as_torch(settings, make, hooks_of, options):
    model, plain = make(), make()
    engine = ebb.initialize(model, settings, **options)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for of_step in vector_batches(4, engine.world.size):  # an engine watches saved tensors less after two steps
        for batch in of_step:
            (squared_error(plain, batch) / len(of_step)).backward()
        optimizer.step(), optimizer.zero_grad()
        with hooks_of():
            loss = squared_error(model, of_step[engine.world.rank])
        engine.backward(loss), engine.step()
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.gather(name), value, atol=2e-6), name
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    engine.close()
    return model


@pytest.mark.parametrize("options", [{}, {"units": ["0", "2", "4"]}], ids=["", "units of several modules"])
@on_places
def test_a_store_by_address_gets_each_units_own_values(settings, options):
    """The test would say nothing if each unit had an address of its own, as where small units are gathered as one group."""
    model = _as_torch(settings, _equal_blocks, _ByAddress, options)
    zero = settings["zero_optimization"]
    is_gathered = zero["stage"] == 3 and (ebb.world().size > 1 or "offload_param" in zero)
    assert (len(set().union(*(block.above.addresses for block in model[:6]))) < 6) == is_gathered


@on_places
def test_save_on_cpu_and_checkpoints(settings):
    _as_torch(settings, Checkpointed, torch.autograd.graph.save_on_cpu, {})


@on_one
def test_activations_in_ram_are_those_of_torch(settings):
    """The engine's own offload, which is on for a GPU, because on a CPU all tensors are in RAM."""
    model, plain = Checkpointed(), Checkpointed()
    engine = ebb.initialize(model, settings, resident=["head.weight"])
    kept = SavedInRam(model, engine.units)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    packed = []
    save_on_cpu = torch.autograd.graph.save_on_cpu

    class Counted(save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tensor.data_ptr()) or pack(tensor)

    torch.autograd.graph.save_on_cpu = Counted
    try:
        for (batch,) in vector_batches(3, 1):
            squared_error(plain, batch).backward()
            optimizer.step(), optimizer.zero_grad()
            engine.backward(squared_error(model, batch)), engine.step()
            for name, value in plain.state_dict().items():
                assert torch.allclose(engine.gather(name), value, atol=2e-6), name
    finally:
        torch.autograd.graph.save_on_cpu = save_on_cpu
    shown = {slots.places[1][i] for slots in engine._slots for i in range(len(slots.views))}
    assert packed and not shown.intersection(packed)  # activations, and no parameter
    kept.remove()
    before = len(packed)
    squared_error(model, batch)
    assert len(packed) == before
    engine.close()
    disk = {"offload_activations": "nvme"}
    zero = {**settings["zero_optimization"], "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
    refused(lambda: ebb.initialize(Checkpointed(), {**settings, "zero_optimization": zero, "ebb": disk}), "not on a disk", "UNIMPLEMENTED")
    for key in ({"ebb": {"offload_activations": "cpu"}}, {"activation_checkpointing": {"cpu_checkpointing": True}}):
        ebb.initialize(Checkpointed(), {**settings, **key}).close()


class _OnCpu(Checkpointed):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


@on_one
def test_the_walk_makes_torch_warn_of_nothing(settings):
    """Of torch, because a tensor without values has no address."""
    torch.set_warn_always(True)
    batch = vector_batches(1, 1)[0][0]
    try:
        for kind, options in ((kind, options) for kind in (Blocks, _OnCpu) for options in ({}, {"check": True}, {"check": True, "example": batch[:1]})):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                model = kind()
                engine = ebb.initialize(model, settings, **options)
                engine.backward(squared_error(model, batch)), engine.step()
                engine.close()
            assert [str(one.message) for one in seen if "FakeTensor" in str(one.message)] == [], (kind, options)
    finally:
        torch.set_warn_always(False)
