#!/usr/bin/env python3
"""The cost of many ranks on one machine: a small GPT with 1 to 64 threads and 2 to 16 processes as ranks.

    bench/scaling.py [--threads 1 2 4 8 16 32 64] [--processes 2 4 8 16] [--rounds 3]

Every rank has the same work, so with more ranks than cores a step takes proportionally longer. The
core's milliseconds for one rank's part of a step should stay equal. Memory: the peak resident set of
all processes, over the ranks.
"""

import json
import os
import pathlib
import statistics
import subprocess
import tempfile

from turns import BUILT, environments_of, parser_of, peaks_of, print_head, print_row

MODEL = "--layers 4 --heads 4 --width 128 --context 64 --batch 4 --dtype fp32 --steps 30 --sample 0 --threads 1".split()


def run(gpt, ranks, processes, folder):
    summary = pathlib.Path(folder) / "summary.json"
    command = [gpt, *MODEL, "--summary", summary, *([] if processes else ["--ranks", ranks])]
    kibibytes = sum(peaks_of(command, environments_of(ranks) if processes else [{}], stderr=subprocess.DEVNULL))
    written = json.loads(summary.read_text())
    seconds = written["tokens_per_step"] / written["tokens_per_second"]
    cores = min(ranks, len(os.sched_getaffinity(0)))
    predicted = sum(row["predicted_bytes"] for row in written["memory"])
    return {"step": seconds * 1e3, "core": seconds * 1e3 * cores / ranks,
            "resident": kibibytes / 1024 / ranks, "predicted": predicted / 2**20}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--gpt", default=BUILT / "gpt")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cases = [(ranks, False) for ranks in args.threads] + [(ranks, True) for ranks in args.processes]
    results = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for case in cases:
                results[case].append(run(args.gpt, *case, folder))
    print_head("ranks", "as", "ms a step", "core ms a step and rank", "resident MiB a rank", "predicted MiB a rank")
    for (ranks, processes), rows in results.items():
        row = {key: statistics.median(result[key] for result in rows) for key in rows[0]}
        print_row(ranks, "processes" if processes else "threads", f"{row['step']:.1f}", f"{row['core']:.2f}",
                  f"{row['resident']:.1f}", f"{row['predicted']:.1f}")


if __name__ == "__main__":
    main()
