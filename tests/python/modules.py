"""Modules that are hard to shard by hooks: in what they do between their blocks, keep, pass on or leave out."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """A chain of three blocks; what happens between them is given."""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class InPlaceOnAView(Blocks):
    def forward(self, x):
        for block in self.blocks:
            x = block(x).view(2, 2, 4)
            x.add_(1).tanh_()
            x = x.view(2, 8)
        return self.head(x)


class CachedIntermediate(Blocks):
    """The loss is computed from what a block has kept, not from its output."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            self.kept = torch.sin(self.a(x))
            return self.b(self.kept)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks[:2]:
            x = block(x)
        self.blocks[2](x)
        return self.blocks[2].kept.sum(-1, keepdim=True) + 0 * self.head(x.detach())


class UsedTwice(Blocks):
    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = torch.tanh(block(x))
        return self.head(x)


class Checkpointed(Blocks):
    reentrant = False

    def forward(self, x):
        x = x.requires_grad_()
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return self.head(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointOverTwo(Blocks):
    def forward(self, x):
        x = checkpoint(lambda y: self.blocks[1](torch.tanh(self.blocks[0](y))), x, use_reentrant=False)
        return self.head(torch.tanh(self.blocks[2](x)))


class EarlyStopped(Blocks):
    """The recompute ends by an exception behind the last tensor that backward needs."""

    def forward(self, x):
        def two(y):
            y = torch.tanh(self.blocks[0](y))
            return self.blocks[1](y) + 1

        return self.head(torch.tanh(self.blocks[2](checkpoint(two, x, use_reentrant=False))))


class FrozenMiddle(Checkpointed):
    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)


class FrozenFirst(Blocks):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)


class LeftOut(Blocks):
    """A block whose output is thrown away."""

    def forward(self, x):
        x = torch.tanh(self.blocks[0](x))
        self.blocks[1](x)
        return self.head(torch.tanh(self.blocks[2](x)))


class Containers(Blocks):
    @dataclass
    class Output:
        value: torch.Tensor
        extra: dict

    class Slots:
        __slots__ = ("value",)

    class Block(nn.Linear):
        def __init__(self, kind):
            super().__init__(8, 8)
            self.kind = kind

        def forward(self, x):
            y = torch.tanh(super().forward(x))
            if self.kind == "dataclass":
                return Containers.Output(None, {"deep": [(y,)]})
            if self.kind == "slots":
                made = Containers.Slots()
                made.value = y
                return made
            return {"y": y}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(kind) for kind in ("dataclass", "slots", "dict")])

    def forward(self, x):
        x = self.blocks[0](x).extra["deep"][0][0]
        x = self.blocks[1](x).value
        return self.head(self.blocks[2](x)["y"])


class PassedThrough(nn.Module):
    """Something that the first block makes goes through the others, as T5's bias does."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, bias=None):
            if bias is None:
                bias = self.b(x)
            return torch.tanh(self.a(x) + bias), bias

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(x + bias)


class Resident(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.scale = nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return self.head(x)


class ListsOfLists(nn.Module):
    """Blocks that are lists, of which nobody calls the list."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for a, b in self.layers:
            x = torch.tanh(b(torch.tanh(a(x))))
        return self.head(x)


class OtherMethod(Blocks):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def features(self, x):
            return torch.tanh(self.a(x))

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block.features(x)
        return self.head(x)


class _Product(torch.autograd.Function):
    """A fused head, as in TRL: its backward reads the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class FusedHead(nn.Module):
    """The model itself uses weights of a unit after another module of that unit: between blocks, and at its end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.before = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm, self.middle = nn.LayerNorm(8), nn.Linear(8, 8, bias=False)
        self.after = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.last_norm, self.head = nn.LayerNorm(8), nn.Linear(8, 1, bias=False)

    def forward(self, x):
        for block in self.before:
            x = torch.tanh(block(x))
        x = _Product.apply(self.norm(x), self.middle.weight)
        for block in self.after:
            x = torch.tanh(block(x))
        return _Product.apply(self.last_norm(x), self.head.weight)


class ReadInBackward(FusedHead):
    """What the weight has made reaches the loss past the blocks that come next, so its backward runs within theirs."""

    def forward(self, x):
        for block in self.before:
            x = torch.tanh(block(x))
        x = self.norm(x)
        aside = _Product.apply(x, self.middle.weight)
        for block in self.after:
            x = torch.tanh(block(x))
        return self.head(self.last_norm(x)) + aside.sum(-1, keepdim=True)


class MixtureOfExperts(nn.Module):
    """Each rank's samples take other experts."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x):
            weights = self.router(x).softmax(-1)
            chosen = weights.argmax(-1)
            return torch.stack([self.experts[int(c)](row) * weights[i, c] for i, (row, c) in enumerate(zip(x, chosen))])

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class SharedList(nn.Module):
    """Blocks share modules of a list that the model registers before them."""

    class Block(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            for one in self.shared:
                x = torch.tanh(one(x))
            return torch.tanh(self.linear(x))

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.shared = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.blocks = nn.ModuleList([self.Block(self.shared) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("in backward")
