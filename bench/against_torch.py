#!/usr/bin/env python3
"""Ebb's gpt against the same model in PyTorch, on this machine's CPU, in turns.

    python3 -m venv /somewhere && /somewhere/bin/pip install torch numpy
    bench/against_torch.py --python /somewhere/bin/python [--rounds 5] [--batch 4 16] [--steps 12] [--tensor]

Every round runs each program once, in an order that changes from round to round. The table has the
medians of tokens per second and the ratio of Ebb's to each. All programs: 6 layers, width 384,
context 256, clipping at 1, AdamW, two ranks with half of the cores each (plain: one process with all
cores). With --tensor the two ranks share each layer, in PyTorch by DTensor. Peak memory is the resident
set of one rank; for PyTorch also above the bare import.
"""

import json
import pathlib
import statistics
import sys
import tempfile

from turns import BUILT, HERE, environments_of, in_turn, median_ratio, output, parser_of, peaks_of, print_head, print_row

DATA = "/usr/share/common-licenses/GPL-3"
CONFIG = {
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.01}},
}


def ebb(args, batch, dtype, folder, processes, *options):
    """As two threads of one process, or as two processes that meet as torchrun's do."""
    config, summary = folder / "config.json", folder / "summary.json"
    of_rank = batch if "--tensor" in options else batch // 2
    config.write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": of_rank}))
    command = [args.gpt, "--config", config, "--context", 256, "--dtype", dtype, "--data", DATA, "--steps", args.steps,
               "--summary", summary, "--sample", 0, *options]
    if not processes:
        command += ["--ranks", 2]
    peaks = peaks_of(command, environments_of(2) if processes else [{}])
    written = json.loads(summary.read_text())
    result = {"tokens_per_second": written["tokens_per_second"]}
    if processes:
        result["peak_mib"] = max(peaks) / 1024
    return result


def torch(args, mode, batch, dtype):
    command = [args.python, HERE / "peers" / "torch_gpt.py", mode, "--batch", batch, "--steps", args.steps,
               "--dtype", dtype, "--data", DATA]
    return json.loads(output(command).splitlines()[-1])


def programs_of(args, batch, folder):
    """The first is compared with each."""
    if args.tensor:
        cut, rows = ("--tensor", 2), ("--tensor", 2, "--sequence-parallel")
        return {
            "Ebb fp32, tensor 2, processes": lambda: ebb(args, batch, "fp32", folder, True, *cut),
            "Ebb fp32, tensor 2, threads": lambda: ebb(args, batch, "fp32", folder, False, *cut),
            "Ebb fp32, tensor 2, sequence parallel, processes": lambda: ebb(args, batch, "fp32", folder, True, *rows),
            "Ebb fp32, data 2, processes": lambda: ebb(args, batch, "fp32", folder, True),
            "DTensor fp32": lambda: torch(args, "tensor", batch, "fp32"),
        }
    return {
        "Ebb fp32, processes": lambda: ebb(args, batch, "fp32", folder, processes=True),
        "Ebb fp32, threads": lambda: ebb(args, batch, "fp32", folder, processes=False),
        "Ebb bf16, processes": lambda: ebb(args, batch, "bf16", folder, processes=True),
        "FSDP2 fp32": lambda: torch(args, "fsdp2", batch, "fp32"),
        "DDP fp32": lambda: torch(args, "ddp", batch, "fp32"),
        "plain fp32": lambda: torch(args, "plain", batch, "fp32"),
    }


def measure(args, batch, folder):
    programs = programs_of(args, batch, folder)
    results = {name: [] for name in programs}
    for turn in range(args.rounds):
        for name in in_turn(programs, turn):
            results[name].append(programs[name]())
            print(f"batch {batch}, round {turn + 1}: {name}: "
                  f"{results[name][-1]['tokens_per_second']:.0f} tokens/s", file=sys.stderr)
    return results


def median(results, key):
    values = [result[key] for result in results if key in result]
    return statistics.median(values) if values else None


def print_table(batch, results):
    first = next(iter(results))
    ours = [result["tokens_per_second"] for result in results[first]]
    print(f"\nGlobal batch {batch}\n")
    print_head("program", "tokens/s", f"{first} / this, median of turns", "peak MiB a rank", "above import")
    for name, rows in results.items():
        speed = median(rows, "tokens_per_second")
        memory = [median(rows, key) for key in ("peak_mib", "peak_mib_above_import")]
        cells = ["" if value is None else f"{value:.0f}" for value in memory]
        ratio = median_ratio(ours, [result["tokens_per_second"] for result in rows])
        print_row(name, f"{speed:.0f}", f"{ratio:.2f}", *cells)


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--python", required=True, help="a Python with torch")
    parser.add_argument("--gpt", default=BUILT / "gpt")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensor", action="store_true", help="both ranks share each layer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for batch in args.batch:
            print_table(batch, measure(args, batch, pathlib.Path(folder)))


if __name__ == "__main__":
    main()
