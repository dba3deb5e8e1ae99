"""Tensor parallelism: transformers' Llama, cut by its own plan over 2 tensor ranks. Parameters and optimizer states are in RAM, in shards over the data
ranks (ZeRO-3).

    torchrun --nproc-per-node 4 examples/python/tensor.py [--tensor N] [--steps N] [--save FOLDER] [--beside-torch]

With 4 ranks there are 2 data ranks, which have different samples, and 2 tensor ranks of each, which have the same samples and blocks of each layer.
--beside-torch also trains a whole copy with plain torch on rank 0, with the batches of all data ranks, and prints its losses and the difference of
the parameters at the end. Needs torch and transformers 5."""

import argparse

import torch
import transformers

import ebb

SEQUENCES, LENGTH = 4, 64  # of a rank's micro-batch
TEXT = b"A trainer hands over its parameters, layer by layer. They are gathered before they are used, and released behind. "


def batch_of(step: int, data_rank: int) -> torch.Tensor:
    """Bytes of the text from a place that depends on step, data rank and sequence: [SEQUENCES, LENGTH]."""
    starts = [(step * 31 + data_rank * 7 + i * 13) % len(TEXT) for i in range(SEQUENCES)]
    return torch.tensor([list((TEXT * 3)[start : start + LENGTH]) for start in starts])


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=LENGTH, attn_implementation="eager",
    ))


def with_torch(steps: int, data_ranks: int, settings: dict) -> tuple[list[float], torch.nn.Module]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **settings["optimizer"]["params"])
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(data_ranks):
            ids = batch_of(step, rank)
            loss = model(input_ids=ids, labels=ids).loss / data_ranks
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=2, help="tensor ranks, which divide the number of ranks and this model's 4 heads of keys and values: 1, 2 or 4")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="a folder for the whole model, as transformers reads it")
    parser.add_argument("--beside-torch", action="store_true")
    options = parser.parse_args()

    settings = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "tensor_parallel": {"autotp_size": options.tensor},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0,
        },
    }
    model = make_model()
    engine = ebb.initialize(model, settings)
    first = engine.world.rank == 0
    expected, plain = with_torch(options.steps, engine.data_ranks, settings) if options.beside_torch and first else ([], None)
    if first:
        print(f"{engine.world.size} ranks: {engine.data_ranks} data x {engine.tensor_ranks} tensor")

    for step in range(options.steps):
        ids = batch_of(step, engine.data_rank)  # the same on the tensor ranks of a data rank
        engine.backward(model(input_ids=ids, labels=ids).loss)
        engine.step()
        report = engine.report()  # the same on every rank
        if first and (step % 5 == 4 or step == 0):
            beside = f"  torch {expected[step]:.6f}" if expected else ""
            print(f"step {report.step:3}  loss {report.loss:.6f}{beside}  norm {report.gradient_norm:.3f}")

    values = engine.state_dict(rank=0)  # by the names and shapes of the whole model
    if plain is not None:
        differences = [(values[name] - value).norm() / value.norm() for name, value in plain.state_dict().items()]
        print(f"parameters differ from torch's by at most {max(differences).item():.1e} of their norm")
    if options.save:
        engine.save_pretrained(options.save)
    engine.close()


if __name__ == "__main__":
    main()
