#!/usr/bin/env python3
"""What a step moves between tiers, for the usual configurations: the table in docs/offload.md.

    cmake --preset release && ninja -C build/release gpt
    bench/traffic_of_tiers.py --disk FOLDER

Trains a GPT of 21.4 M parameters on one rank for four steps each, takes the third's bytes from gpt's summary and divides them by the
parameters. The predicted ones must be equal, and every digest must be that of the run with everything on the device.
"""
import argparse, json, pathlib, subprocess, sys, tempfile

GPT = pathlib.Path(__file__).resolve().parent.parent / "build/release/bin/gpt"
BOTH = ["--offload-param", "nvme", "--offload-optimizer", "nvme"]
STATES = ["--offload-optimizer", "nvme"]
RAM = ["--offload-param", "cpu", "--offload-optimizer", "cpu"]
SPLIT = ["--split-master"]
ROUNDED = ["--stochastic-rounding"]
ROUND = ["--micro-batches-per-round", "all"]
# what, micro-batches, options
ROWS = [
    ("states in RAM", 1, ["--offload-optimizer", "cpu"]),
    ("both in RAM", 1, RAM),
    ("both in RAM, split masters", 1, RAM + SPLIT),
    ("states on NVMe", 1, STATES),
    ("states on NVMe, split masters", 1, STATES + SPLIT),
    ("states on NVMe, stochastic rounding", 1, STATES + ROUNDED),
    ("parameters in RAM, states on NVMe", 1, ["--offload-param", "cpu"] + STATES),
    ("both on NVMe", 1, BOTH),
    ("both on NVMe, split masters", 1, BOTH + SPLIT),
    ("both on NVMe, stochastic rounding", 1, BOTH + ROUNDED),
    ("both on NVMe, 4 micro-batches", 4, BOTH),
    ("the same, layer-major", 4, BOTH + ROUND),
    ("the same, layer-major, split masters", 4, BOTH + ROUND + SPLIT),
    ("the same, layer-major, early updates", 4, BOTH + ROUND + ["--config", "early.json"]),
    ("the same, layer-major, early updates, split masters", 4, BOTH + ROUND + SPLIT + ["--config", "early.json"]),
    ("both on NVMe, fp32 compute", 1, BOTH + ["--dtype", "fp32"]),
]
EARLY = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "gradient_clipping": 0, "ebb": {"check_overflow": false},
            "zero_optimization": {"stage": 3, "offload_param": {"max_in_cpu": 0}}}"""


def train(options, micro_batches, disk, folder):
    summary = pathlib.Path(folder) / "summary.json"
    subprocess.run([GPT, "--ranks", "1", "--layers", "12", "--width", "384", "--heads", "6", "--context", "64", "--batch", "1",
                    "--accumulate", str(micro_batches), "--recompute", "--steps", "4", "--sample", "0", "--nvme-path", disk,
                    "--summary", summary, *options], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return json.loads(summary.read_text())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--disk", required=True)
    disk = pathlib.Path(parser.parse_args().disk).resolve()
    digests = {}
    print("| what is where | RAM to device | device to RAM | NVMe read | NVMe written | NVMe, all |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "early.json").write_text(EARLY)
        for what, micro_batches, options in ROWS:
            alike = [o for o in options if o in ("--dtype", "fp32", "--config", "early.json", *ROUND, *ROUNDED)]
            key = (micro_batches, *alike)
            if key not in digests:
                digests[key] = train(alike, micro_batches, disk, folder)["parameter_digest"]
            summary = train(options, micro_batches, disk, folder)
            if summary["parameter_digest"] != digests[key]:
                sys.exit(f"{what}: another digest than with everything on the device")
            bytes_of = {}
            for row in summary["traffic"]:
                if row["bytes"] != row["predicted_bytes"]:
                    sys.exit(f"{what}: predicted otherwise: {row}")
                cell = row["tier"], row["direction"]
                bytes_of[cell] = bytes_of.get(cell, 0) + row["bytes"] / summary["parameters"]
            cells = [bytes_of.get(cell, 0) for cell in (("cpu", "read"), ("cpu", "write"), ("nvme", "read"), ("nvme", "write"))]
            print(f"| {what} | " + " | ".join(f"{cell:.1f}" for cell in cells + [cells[2] + cells[3]]) + " |", flush=True)


main()
