#!/usr/bin/env python3
"""One AdamW step (fp32 parameters, gradients and states, 28 bytes moved per element): Ebb's, torch's fused AdamW and
DeepSpeed's CPUAdam, in turns. A step with the same bytes and little arithmetic shows the limit of the machine's memory.

    bench/optimizer_against_peers.py --python PYTHON_WITH_TORCH [--elements 100000000] [--threads 1 2] [--steps 15]

All programs stay alive and make one step each, in an order that changes, so that other load on the machine disturbs all of
them alike. The table has medians, and medians of the ratios of neighbours. DeepSpeed builds its kernel at the first use. If
it cannot, it is left out, and a line says so.
"""

import statistics
import sys
import time

from turns import BUILT, HERE, Failed, Peer, in_turn, is_number, median_ratio, parser_of, print_head, print_row


class Program(Peer):
    def step(self):
        """Seconds and the first parameter."""
        self.tell("")
        return map(float, self.answer(is_number).split())


def measure(args, threads):
    commands = {
        "Ebb": [args.step, args.elements, threads],
        "memory alone": [args.step, args.elements, threads, "memory"],
        "torch fused": [args.python, HERE / "peers/adamw.py", "torch", args.elements, threads],
        "DeepSpeed CPUAdam": [args.python, HERE / "peers/adamw.py", "deepspeed", args.elements, threads],
    }
    programs = {}
    for name, command in commands.items():
        program = Program(command, OMP_NUM_THREADS=str(threads))
        try:
            for _ in range(2):  # states are made in the first
                program.step()
            programs[name] = program
        except (Failed, BrokenPipeError):
            print(f"{name} is left out: {' '.join(str(word) for word in command)} has failed", file=sys.stderr)
    seconds = {name: [] for name in programs}
    for turn in range(args.steps):
        values = {}
        for name in in_turn(programs, turn):
            taken, value = programs[name].step()
            if name != "memory alone":
                values[name] = value
            seconds[name].append(taken)
            time.sleep(0.02)  # a library's threads may spin for a while
        if max(values.values()) - min(values.values()) > 1e-5:
            sys.exit(f"the programs do not compute the same: {values}")
    for program in programs.values():
        program.close()
    for name in programs:
        median = statistics.median(seconds[name])
        print_row(threads, name, f"{median * 1e3:.1f}", f"{args.elements * 28 / median / 1e9:.1f}",
                  f"{median_ratio(seconds['Ebb'], seconds[name]):.2f}")


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--step", default=BUILT / "optimizer_step")
    parser.add_argument("--python", required=True, help="a Python with torch and, if possible, deepspeed")
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    print_head("threads", "library", "ms", "GB/s", "Ebb's time of it")
    for threads in args.threads:
        measure(args, threads)


if __name__ == "__main__":
    main()
