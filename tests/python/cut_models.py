"""Models that are cut over tensor ranks, trained beside plain torch over the whole batch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from training import config, llama, of_output, with_torch

import ebb
from ebb._tensor_ranks import _cut

SGD = {"type": "SGD", "params": {"lr": 0.1}}
STEPS = 4
TIERS = {"device": {}, "cpu": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}


def mesh_of(tensor=2):
    world = ebb.world()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return init_device_mesh("cpu", (world.size // tensor, tensor), mesh_dim_names=("dp", "tp"))


def cut_by(model):
    """A transformers model, by its own plan."""
    _cut(model, 2, "autotp_size", ebb.world())


def cut_llama():
    """A Llama that its configuration cuts over two tensor ranks, and its engine."""
    mesh_of()
    model = llama()
    return model, ebb.initialize(model, config(3, SGD, tensor_parallel={"autotp_size": 2}))


def all_equal(value):
    """Whether each rank has this value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(one == values[0] for one in values)


def tiers_of(stage, tier):
    return TIERS[tier] if stage == 3 else {name: value for name, value in TIERS[tier].items() if name == "offload_optimizer"}


def far(one, other):
    """The difference in parts of the value."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def train(model, batches, settings, loss_of=of_output, **options):
    """`batches`[step][data rank]. Losses and norms of the report, the engine."""
    engine = ebb.initialize(model, settings, **options)
    losses, norms = [], []
    for of_step in batches:
        engine.backward(loss_of(model, of_step[engine.data_rank]))
        engine.step()
        report = engine.report()
        losses.append(report.loss), norms.append(report.gradient_norm)
    assert all_equal((losses, norms))
    return losses, norms, engine


def is_like_torch(make, batches, cut=None, settings=None, loss_of=of_output, tolerance=1e-6, clip=0.5, optimizer=SGD, **options):
    """`make` makes the whole model, `cut` cuts it; None: the configuration has it cut."""
    settings = {"optimizer": optimizer, "gradient_clipping": clip, **(settings or {})}
    settings = config(settings.pop("stage", 3), settings.pop("optimizer"), **settings)
    plain, model = make(), make()
    expected = with_torch(plain, batches, loss_of, optimizer, clip)
    if cut:
        cut(model)
    else:
        settings["tensor_parallel"] = {"autotp_size": 2}
    losses, norms, engine = train(model, batches, settings, loss_of, **options)
    assert engine.tensor_ranks == 2 and engine.data_ranks == len(batches[0])
    assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for ours, theirs in zip(losses, expected):
        assert abs(ours - theirs) <= tolerance * abs(theirs), (losses, expected)
    assert norms[0] > clip, norms  # else nothing is clipped
    for name, value in plain.named_parameters():
        whole = engine.gather(name, master=True)
        assert whole.shape == value.shape and far(whole, value.detach()) <= tolerance, (name, far(whole, value.detach()))
    engine.close()


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, width=16, hidden=24, depth=3):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.1 * torch.randn_like(parameter)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def vectors(steps, each, width=16, rows=4, length=8):
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return [[(draw(rows, length, width), draw(rows, length, 1)) for _ in range(each)] for _ in range(steps)]


def error_of(model, batch):
    x, y = batch
    return 10 * (model(x) - y).square().mean()


def by_columns_and_rows(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_sequence(model, mesh):
    """Norms have a part of the sequence on each tensor rank, so that their gradients are partial."""
    for i, block in enumerate(model.blocks):
        parallelize_module(block, mesh, {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        })
    parallelize_module(model, mesh, {
        "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    })


@contextlib.contextmanager
def refuses(*texts):
    with pytest.raises(ebb.Error) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), caught.value
