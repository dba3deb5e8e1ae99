"""LoRA on a frozen bf16 base on the disk, with two micro-batches a step and gradient checkpointing.

    torchrun --nproc-per-node 2 examples/python/lora.py [--steps N] [--save FOLDER]

Needs torch, transformers and peft. Here the base has random weights. For your own base call
AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16")."""

import argparse
import tempfile

import peft
import torch
import transformers

import ebb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", default=None, help="where the adapter goes")
    options = parser.parse_args()

    torch.manual_seed(1)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    )).to(torch.bfloat16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()

    engine = ebb.initialize(model, {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": tempfile.gettempdir(), "max_in_cpu": 0}},
    })
    generator = torch.Generator().manual_seed(engine.world.rank)
    for _ in range(options.steps):
        for _ in range(2):
            ids = torch.randint(0, 16, (1, 32), generator=generator)
            engine.backward(model(input_ids=ids, labels=ids).loss)
            engine.step()
        if engine.world.rank == 0:
            print(f"step {engine.report().step}  loss {engine.report().loss:.4f}")
    if options.save:
        engine.save_pretrained(options.save, trainable_only=True)
    engine.close()


if __name__ == "__main__":
    main()
