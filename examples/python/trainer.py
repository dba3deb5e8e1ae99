"""transformers' Trainer with a DeepSpeed file: a Llama with random weights learns a text. Evaluates, saves checkpoints, and writes the model.

    torchrun --nproc-per-node 2 examples/python/trainer.py OUT [--config ds_config.json] [--steps N] [--resume]

OUT: the folder for checkpoints and the model, the same on every rank. Without a launcher there is one rank. Needs torch, transformers and
accelerate."""

import argparse
from pathlib import Path

import torch
import transformers

from ebb.integrations.transformers import Trainer

LENGTH = 64
TEXT = b"A trainer hands over its parameters, layer by layer. They are gathered before they are used, and released behind. "


class Windows(torch.utils.data.Dataset):
    """Windows of the text, as bytes."""

    def __len__(self) -> int:
        return len(TEXT) // 16 * 16  # whole steps on one rank and on two

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(list((TEXT * 2)[start : start + LENGTH]))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--config", default=Path(__file__).with_name("ds_config.json"), help="DeepSpeed's JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of OUT")
    options = parser.parse_args()

    torch.manual_seed(1)  # the same values on every rank
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    ))
    trainer = Trainer(
        model,
        transformers.TrainingArguments(
            options.out, max_steps=options.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=2e-3,
            warmup_steps=2, logging_steps=5, eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=10, save_total_limit=2,
            report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Windows(),
        eval_dataset=torch.utils.data.Subset(Windows(), range(16)),
        ebb_config=options.config,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        trained = transformers.AutoModelForCausalLM.from_pretrained(options.out)
        start = Windows()[0]["input_ids"][None, :16]
        print("text:", bytes(trained.generate(start, max_new_tokens=32, do_sample=False, pad_token_id=0)[0].clamp(max=127).tolist()).decode())


if __name__ == "__main__":
    main()
