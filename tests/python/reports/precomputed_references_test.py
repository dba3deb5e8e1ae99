"""TRL's DPO and KTO with log-probabilities of the reference that were computed before training: they come into the loss as they are."""

import os

import pytest
import torch
from ranks import on_one
from trainer_test import EXACT, ZERO, logged, ours_of
from training import llama

pytest.importorskip("trl", reason="trl is not installed: EBB_FULL=1 installs it")
WORDS = ["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]


def _tokenizer():
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="</s>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="</s>")


def _answers(kind):
    import datasets

    rows = []
    for i in range(8):
        prompt, good, bad = (" ".join(WORDS[2 + (i * step + at) % 26] for at in range(6)) for step in (1, 3, 5))
        if kind == "DPO":
            rows.append({"prompt": prompt, "chosen": " " + good, "rejected": " " + bad})
        else:
            rows.append({"prompt": prompt, "completion": " " + (bad if i % 2 else good), "label": i % 2 == 0})
    return datasets.Dataset.from_list(rows)


def _trained(kind, folder, is_ours, **more):
    """The losses, and the log-probabilities of the reference as the batches and as the data have them."""
    import trl

    trainer, seen = getattr(trl, f"{kind}Trainer"), {}

    class Watched(trainer):
        def compute_loss(self, model, inputs, *arguments, **keywords):
            for name, value in inputs.items():
                if name.startswith("ref_"):
                    seen.setdefault(name, set()).update(value.tolist())
            return super().compute_loss(model, inputs, *arguments, **keywords)

    args = getattr(trl, f"{kind}Config")(
        folder, **{**EXACT, **more}, use_cpu=True, per_device_train_batch_size=2, report_to=[], logging_steps=1, disable_tqdm=True, max_steps=3,
        save_strategy="no", dataloader_pin_memory=False, precompute_ref_log_probs=True, gradient_checkpointing=False,
    )
    config = {"ebb_config": {"zero_optimization": ZERO}} if is_ours else {}
    made = (ours_of(Watched) if is_ours else Watched)(
        model=llama(), args=args, train_dataset=_answers(kind), processing_class=_tokenizer(), **config
    )
    made.train()
    given = {name: set(torch.tensor(made.train_dataset[name]).tolist()) for name in seen}
    if is_ours:
        made.engine.close()
    return logged(made), seen, given


@pytest.mark.skipif(not os.environ.get("EBB_FULL"), reason="imports of trl take 10 s: EBB_FULL=1")
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
@on_one
def test_references_are_not_rounded(kind, folder):
    losses, seen, given = _trained(kind, folder, True, bf16=False)
    assert losses == _trained(kind, folder, False, bf16=False)[0] and len(set(losses)) == 3
    assert seen
    _, seen, given = _trained(kind, folder, True, bf16=True)
    for name, values in seen.items():
        assert len(values) > 2 and values <= given[name]
        assert any(torch.tensor(value).bfloat16().item() != value for value in values)
