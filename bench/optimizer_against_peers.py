#!/usr/bin/env python3
"""One AdamW step (fp32 parameters, gradients and states, 28 bytes moved per element): Ebb's, torch's fused AdamW and
DeepSpeed's CPUAdam, in turns. A step with the same bytes and little arithmetic shows the limit of the machine's memory.

    bench/optimizer_against_peers.py --python PYTHON_WITH_TORCH [--elements 100000000] [--threads 1 2] [--steps 15]

All programs stay alive and make one step each, in an order that changes, so that other load on the machine disturbs all of
them alike. The table has medians, and medians of the ratios of neighbours. DeepSpeed builds its kernel at the first use. If
it cannot, it is left out, and a line says so.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent


class Program:
    def __init__(self, command, threads):
        self.process = subprocess.Popen([str(word) for word in command], text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": str(threads)})

    def step(self):
        """Seconds and the first parameter."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = ""
        while not line[:1].isdigit():  # lines of a library
            line = self.process.stdout.readline()
            if not line:
                raise EOFError
        seconds, value = line.split()
        return float(seconds), float(value)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(args, threads):
    commands = {
        "Ebb": [args.step, args.elements, threads],
        "memory alone": [args.step, args.elements, threads, "memory"],
        "torch fused": [args.python, HERE / "peers/adamw.py", "torch", args.elements, threads],
        "DeepSpeed CPUAdam": [args.python, HERE / "peers/adamw.py", "deepspeed", args.elements, threads],
    }
    programs = {}
    for name, command in commands.items():
        program = Program(command, threads)
        try:
            for _ in range(2):  # states are made in the first
                program.step()
            programs[name] = program
        except (EOFError, BrokenPipeError):
            print(f"{name} is left out: {' '.join(str(word) for word in command)} has failed", file=sys.stderr)
    seconds = {name: [] for name in programs}
    names = list(programs)
    for turn in range(args.steps):
        values = {}
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            taken, value = programs[name].step()
            if name != "memory alone":
                values[name] = value
            seconds[name].append(taken)
            time.sleep(0.02)  # a library's threads may spin for a while
        if max(values.values()) - min(values.values()) > 1e-5:
            sys.exit(f"the programs do not compute the same: {values}")
    for program in programs.values():
        program.close()
    for name in names:
        median = statistics.median(seconds[name])
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds["Ebb"], seconds[name]))
        print(f"| {threads} | {name} | {median * 1e3:.1f} | {args.elements * 28 / median / 1e9:.1f} | {ratio:.2f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--step", default=HERE.parent / "build/release/bin/optimizer_step")
    parser.add_argument("--python", required=True, help="a Python with torch and, if possible, deepspeed")
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    print("| threads | library | ms | GB/s | Ebb's time of it |\n|---|---|---|---|---|")
    for threads in args.threads:
        measure(args, threads)


if __name__ == "__main__":
    main()
