"""A training loop: transformers' Llama with random weights learns to repeat a text. Parameters and optimizer states are on the disk.

    torchrun --nproc-per-node 2 examples/python/loop.py [--steps N] [--nvme FOLDER] [--beside-torch]

--beside-torch also trains a copy with plain torch on rank 0, with the batches of all ranks, and prints its losses beside Ebb's. Needs torch and
transformers. Without a launcher there is one rank."""

import argparse
import tempfile

import torch
import transformers

import ebb

SEQUENCES, LENGTH = 4, 64  # of a rank's micro-batch
TEXT = b"A trainer hands over its parameters, layer by layer. They are gathered before they are used, and released behind. "


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Bytes of the text from a place that depends on step, rank and sequence: [SEQUENCES, LENGTH]."""
    starts = [(step * 31 + rank * 7 + i * 13) % len(TEXT) for i in range(SEQUENCES)]
    return torch.tensor([list((TEXT * 3)[start : start + LENGTH]) for start in starts])


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH, attn_implementation="eager",
    ))


def torch_losses(steps: int, ranks: int, settings: dict) -> list[float]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **settings["optimizer"]["params"])
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(ranks):
            ids = batch_of(step, rank)
            loss = model(input_ids=ids, labels=ids).loss / ranks
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="a folder on a disk, the same on every rank")
    parser.add_argument("--beside-torch", action="store_true")
    options = parser.parse_args()

    disk = {"device": "nvme", "nvme_path": options.nvme}
    settings = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": dict(disk, max_in_cpu=0), "offload_optimizer": disk},
    }
    model = make_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine = ebb.initialize(model, settings)
    first = engine.world.rank == 0
    expected = torch_losses(options.steps, engine.world.size, settings) if options.beside_torch and first else None

    for step in range(options.steps):
        ids = batch_of(step, engine.world.rank)
        loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        report = engine.report()
        if first and (step % 5 == 4 or step == 0):
            beside = f"  torch {expected[step]:.6f}" if expected else ""
            print(f"step {report.step:3}  loss {report.loss:.6f}{beside}  norm {report.gradient_norm:.3f}")

    with torch.no_grad():
        start = batch_of(0, 0)[:1, :16]
        tokens = model.generate(start, max_new_tokens=32, do_sample=False, pad_token_id=0)
    if first:
        print("text:", bytes(tokens[0].clamp(max=127).tolist()).decode())
        held = {tier: sum(row.peak for row in engine.memory() if row.tier == tier) for tier in ("device", "cpu", "nvme")}
        print("a rank holds at most", ", ".join(f"{bytes_ / 2**20:.1f} MiB on {tier}" for tier, bytes_ in held.items()))
        print(f"DDP holds {16 * parameters / 2**20:.1f} MiB on the device of every rank: 16 bytes a parameter, with gradients and AdamW's states")
    engine.close()


if __name__ == "__main__":
    main()
