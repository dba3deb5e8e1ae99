#!/usr/bin/env python3
"""A step with masters and optimizer states in RAM (offload_optimizer "cpu"): Ebb's engine and DeepSpeed's, in turns.

    bench/offloaded_step_against_deepspeed.py --python PYTHON_WITH_DEEPSPEED [--units 8] [--elements 12500000]
                                              [--threads 1 2] [--steps 15]

One rank, bf16, Adam, clipping at 1 (it clips), on as many cores as threads. Backward has no arithmetic of a model: what
it takes is what the runtimes do with gradients (reduce them, bring them to RAM, take norms) and, on Ebb's side, filling
them with a constant. The step is the rest: global norm, unscaling, clipping, update, 16-bit copy, until all of it is done.
Both take the norms of parts in backward; "norm" is how long: DeepSpeed's own calls, and for Ebb, which takes them in the
pass that brings gradients to RAM, a pass over as many alone, which is more.
All programs stay alive and make one step each in an order that turns, so that other load on the machine meets all alike;
the table has medians and medians of the ratios of neighbours, over the better of DeepSpeed's stages 2 and 3.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
WARM_UPS = 3


class Program:
    def __init__(self, command, threads):
        self.process = subprocess.Popen(
            [str(word) for word in command], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"DS_ACCELERATOR": "cpu"} | os.environ | {"OMP_NUM_THREADS": str(threads)},
            preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads]))

    def step(self):
        """Seconds of backward, of the rest and of norms, and the first parameter."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line[:1].isdigit():  # else it is what a library says on its way
                return tuple(map(float, line.split()))
        sys.exit(f"{' '.join(self.process.args)} has failed")

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(args, threads):
    shape = [args.dtype, args.units, args.elements, threads]
    commands = {"Ebb": [args.step, *shape]} | {
        f"DeepSpeed stage {stage}": [args.python, HERE / "peers/offloaded_step.py", stage, *shape] for stage in [2, 3]}
    programs = {name: Program(command, threads) for name, command in commands.items()}
    names = list(programs)
    times = {name: [] for name in names}
    for turn in range(WARM_UPS + args.steps):
        values = []
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            backward, step, norm, value = programs[name].step()
            values.append(value)
            if turn >= WARM_UPS:
                times[name].append({"step": step, "norm": norm, "step and norm": step + norm,
                                    "backward and step": backward + step})
            time.sleep(0.02)  # a library's threads may spin for a while
        if max(values) - min(values) > 1e-4:
            sys.exit(f"the programs do not compute the same: {values}")
    for program in programs.values():
        program.close()
    medians = {name: {what: statistics.median(row[what] for row in rows) for what in rows[0]}
               for name, rows in times.items()}
    for name in names:
        print(f"| {threads} | {name} | " + " | ".join(f"{medians[name][what] * 1e3:.0f}" for what in medians[name]) + " |")
    ratios = []
    for what in medians["Ebb"]:
        peer = min(names[1:], key=lambda name: medians[name][what])
        ratios.append(statistics.median(ours[what] / theirs[what] for ours, theirs in zip(times["Ebb"], times[peer])))
    print(f"| {threads} | **Ebb's time of the better one's** | " + " | ".join(f"**{ratio:.2f}**" for ratio in ratios) + " |",
          flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--step", default=HERE.parent / "build/release/bin/offloaded_step")
    parser.add_argument("--python", required=True, help="one that has torch and deepspeed")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16", help="fp16 where DeepSpeed has it on the CPU")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--elements", type=int, default=12_500_000, help="of a unit")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    print("load before: " + " ".join(f"{value:.1f}" for value in os.getloadavg()))
    print("| threads | runtime | step, ms | norm, ms | step and norm, ms | backward and step, ms |\n|---|---|---|---|---|---|")
    for threads in args.threads:
        measure(args, threads)


if __name__ == "__main__":
    main()
