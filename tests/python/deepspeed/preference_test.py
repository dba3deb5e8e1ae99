"""Preference training with adapters: a step has the policy's forward, and the reference's, which is that of the model without its adapters."""

import contextlib
import copy

import loops
import pytest
import torch
import training
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint


class Adapted(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.recomputes = recomputes == "within"
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.is_on = True

    def forward(self, x):
        return checkpoint(self.computed, x, use_reentrant=True) if self.recomputes and torch.is_grad_enabled() else self.computed(x)

    def computed(self, x):
        return self.base(x) + (self.up(self.down(x)) if self.is_on else 0)


class Policy(nn.Module):
    """The first and the last unit are frozen, as embeddings and heads are under LoRA."""

    def __init__(self, recomputes):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(recomputes) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x):
        x = self.first(x)
        if self.recomputes in ("reentrant", "within"):
            x.requires_grad_()
        around = {"reentrant": True, "not reentrant": False}.get(self.recomputes)
        for block in self.blocks:
            x = torch.tanh(block(x) if around is None else checkpoint(block, x, use_reentrant=around))
        return self.last(x)

    @contextlib.contextmanager
    def without_adapters(self):
        for block in self.blocks:
            block.is_on = False
        try:
            yield
        finally:
            for block in self.blocks:
                block.is_on = True


def _loss(model, policy, batch, order):
    """`order`: of the forwards. Of the policy there may be several."""
    x, y = batch
    rewards = torch.zeros_like(y)
    for one in order:
        if one == "reference":
            with torch.no_grad(), policy.without_adapters():
                reward = -model(x)
        else:
            reward = model(x / len(one))
        rewards = rewards + reward
    return -nn.functional.logsigmoid(rewards * y).mean()


@pytest.mark.parametrize("recomputes", [None, "reentrant", "not reentrant", "within"])  # within: reentrant, in the block
@pytest.mark.parametrize("orders", [
    [["policy", "reference"]], [["reference", "policy"]], [["chosen", "reference", "rejected", "reference"]],
    [["policy"], ["policy", "reference"]],  # by micro-batches
])
@pytest.mark.parametrize("ranks, stage", [("one", 2), ("two", 2), ("two", 3)], indirect=["ranks"])
@on_ranks
def test_a_reference_without_adapters_beside_the_policy(stage, orders, recomputes):
    import ebb

    world = ebb.world()
    batches = training.vector_batches(3, 2 * world.size)
    policy = Policy(recomputes)
    plain = copy.deepcopy(policy)
    engine = loops.begin(policy, loops.config(stage, accumulate=2), lambda parameters: loops.adamw([one for one in parameters if one.requires_grad]))
    optimizer = loops.adamw([one for one in plain.parameters() if one.requires_grad])
    for of_step in batches:
        ours = theirs = 0.0
        for number, batch in enumerate(of_step):
            order = orders[number % len(orders)]
            if number // 2 == world.rank:
                loss = _loss(engine, policy, batch, order)
                engine.backward(loss)
                engine.step()
                ours += loops.mean_over_ranks(loss) / 2
            loss = _loss(plain, plain, batch, order) / len(of_step)
            loss.backward()
            theirs += loss.item()
        norm = nn.utils.clip_grad_norm_([one for one in plain.parameters() if one.requires_grad], 1.0)
        optimizer.step(), optimizer.zero_grad()
        loops.check([ours, engine.get_global_grad_norm()], [theirs, norm.item()])
    values = engine.module_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=1e-6)
    engine.destroy()
