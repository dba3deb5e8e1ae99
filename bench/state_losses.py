#!/usr/bin/env python3
"""Held-out losses with optimizer states of 8 and 16 bits beside those with fp32 states, after the same steps from the same seed.

    bench/state_losses.py --data tinyshakespeare.txt [--gpt build/release/bin/gpt] [--steps 1000] [--layers 2] [--width 128] [--bound 0.005]

gpt trains with AdamW and with Lion on two ranks: at stage 0, and at stage 3 with masters and states on NVMe (a folder of TMPDIR). A line of Markdown for each
case goes out when its runs have ended. Exit status 1: a loss is further from that with fp32 states than the bound, as a part of it."""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

OPTIMIZERS = {
    "AdamW": {"lr": 8e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "Lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
}
PLACES = {"stage 0": {"stage": 0}, "stage 3, NVMe": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
STATES = ("fp32", "bf16", "8bit")


def held_out_loss(options: argparse.Namespace, folder: pathlib.Path, kind: str, states: str, place: dict) -> float:
    zero = {key: {**value, "nvme_path": str(folder)} if isinstance(value, dict) else value for key, value in place.items()}
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "bf16": {"enabled": True}, "zero_optimization": zero,
        "optimizer": {"type": kind, "params": {**OPTIMIZERS[kind], "states": states}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "cos_min_ratio": 0.05, "total_num_steps": "auto"}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    summary = folder / "summary.json"
    command = [
        options.gpt, "--config", folder / "config.json", "--data", options.data, "--steps", options.steps, "--layers", options.layers, "--heads", 4,
        "--width", options.width, "--ranks", 2, "--threads", 1, "--sample", 0, "--summary", summary,
    ]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return json.loads(summary.read_text())["held_out"][-1]["loss"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--gpt", default="build/release/bin/gpt")
    for name, default in (("steps", 1000), ("layers", 2), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bound", type=float, default=0.005)
    parser.add_argument("--only", default="", help="the cases whose name contains this, such as 'Lion, stage 0'")
    options = parser.parse_args()
    within = True
    print("| optimizer | place | " + " | ".join(STATES) + " | bf16 / fp32 - 1 | 8bit / fp32 - 1 |\n|---|---|---|---|---|---|---|", flush=True)
    for kind in OPTIMIZERS:
        for name, place in PLACES.items():
            if options.only not in f"{kind}, {name}":
                continue
            with tempfile.TemporaryDirectory() as folder:
                losses = [held_out_loss(options, pathlib.Path(folder), kind, states, place) for states in STATES]
            apart = [loss / losses[0] - 1 for loss in losses[1:]]
            within = within and all(abs(part) <= options.bound for part in apart)
            cells = [f"{loss:.4f}" for loss in losses] + [f"{100 * part:+.2f}%" for part in apart]
            print(f"| {kind} | {name} | " + " | ".join(cells) + " |", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
