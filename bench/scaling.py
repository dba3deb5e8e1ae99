#!/usr/bin/env python3
"""The cost of many ranks on one machine: a small GPT with 1 to 64 threads and 2 to 16 processes as ranks.

    bench/scaling.py [--threads 1 2 4 8 16 32 64] [--processes 2 4 8 16] [--rounds 3]

Every rank has the same work, so with more ranks than cores a step takes proportionally longer. The
core's milliseconds for one rank's part of a step should stay equal. Memory: the peak resident set of
all processes, over the ranks.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "--layers 4 --heads 4 --width 128 --context 64 --batch 4 --dtype fp32 --steps 30 --sample 0 --threads 1".split()


def run(gpt, ranks, processes, folder):
    summary = pathlib.Path(folder) / "summary.json"
    command = [str(gpt), *MODEL, "--summary", str(summary)]
    environments = [{}]
    if processes:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        environments = [place | {"RANK": str(rank)} for rank in range(ranks)]
    else:
        command += ["--ranks", str(ranks)]
    started = [subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL) for environment in environments]
    kibibytes = 0
    for process in started:
        _, status, usage = os.wait4(process.pid, 0)
        if status != 0:
            sys.exit(f"{command} has failed")
        kibibytes += usage.ru_maxrss
    written = json.loads(summary.read_text())
    seconds = written["tokens_per_step"] / written["tokens_per_second"]
    cores = min(ranks, len(os.sched_getaffinity(0)))
    predicted = sum(row["predicted_bytes"] for row in written["memory"])
    return {"step": seconds * 1e3, "core": seconds * 1e3 * cores / ranks,
            "resident": kibibytes / 1024 / ranks, "predicted": predicted / 2**20}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gpt", default=HERE.parent / "build/release/bin/gpt")
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
    print("| ranks | as | ms a step | core ms a step and rank | resident MiB a rank | predicted MiB a rank |\n|---|---|---|---|---|---|")
    for (ranks, processes), rows in results.items():
        row = {key: statistics.median(result[key] for result in rows) for key in rows[0]}
        print(f"| {ranks} | {'processes' if processes else 'threads'} | {row['step']:.1f} | {row['core']:.2f} | "
              f"{row['resident']:.1f} | {row['predicted']:.1f} |")


if __name__ == "__main__":
    main()
