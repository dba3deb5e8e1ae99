"""transformers' Trainer in bf16: labels and log-probabilities of a batch have the precision that the collator gives them."""

import torch
import transformers
from ranks import on_one
from trainer_test import ZERO, arguments
from training import vector_batches

GIVEN = {"labels": 1000.6, "reference": -300.4, "weights": 0.1}


class _Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.head = torch.nn.Linear(8, 1)
        self.seen = []

    def forward(self, x, labels, reference, weights, nested):
        self.seen.append([value.flatten()[0].item() for value in (labels, reference, weights, nested["margin"])])
        h = x.to(self.head.weight.dtype)
        for block in self.blocks:
            h = torch.tanh(block(h))
        y = self.head(h).squeeze(-1).float()
        return {"loss": (weights * (y - labels / 1000)).square().mean() + 0 * reference.sum()}


class _Vectors(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = vector_batches(1, 1, seed=i)[0][0][0][0]
        return {"x": x, "nested": {"margin": torch.tensor(1000.6)}, **{name: torch.tensor(value) for name, value in GIVEN.items()}}


def _seen(folder, kind):
    from ebb.integrations.transformers import Trainer

    model = _Regression()
    more = {"ebb_config": {"zero_optimization": ZERO}} if kind == "ebb" else {}
    trainer = (Trainer if kind == "ebb" else transformers.Trainer)(
        model=model, args=arguments(folder, max_steps=2, bf16=True, label_names=["labels"]), train_dataset=_Vectors(), eval_dataset=_Vectors(),
        data_collator=torch.utils.data.default_collate, **more,
    )
    trainer.train()
    trainer.evaluate()
    if kind == "ebb":
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        trainer.engine.close()
    return {tuple(row) for row in model.seen}


@on_one
def test_floats_are_not_rounded(folder):
    expected = tuple(torch.tensor(value).item() for value in (*GIVEN.values(), 1000.6))
    assert _seen(folder, "transformers") == {expected}
    assert _seen(folder, "ebb") == {expected}
