#!/usr/bin/env python3
"""A save and a load of the same states, in turns: Ebb's, torch.distributed.checkpoint's, DeepSpeed's, and a bare loop's.

    bench/checkpoint_against_peers.py FOLDER --python PYTHON_WITH_TORCH [--units 13] [--elements 8388608] [--rounds 5]

One rank has fp32 masters and Adam's two states in RAM. A save ends when its files are synced. A load begins with the
files dropped from the page cache. "disk" writes and reads as many bytes with O_DIRECT in the same folder
(checkpoint_bench). The order of programs changes from round to round. The table has medians, and medians of the ratios
within a round. If that Python has no DeepSpeed, its rows are left out, and a line says so.
"""

import os
import pathlib
import shutil
import statistics
import subprocess

from turns import BUILT, HERE, Peer, in_turn, is_number, median_ratio, parser_of, print_head, print_row


# A DS_ACCELERATOR of the user wins.
ON_CPU = {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}


class Program(Peer):
    def __init__(self, command):
        super().__init__(command, stderr=subprocess.DEVNULL, **ON_CPU)

    def seconds_of(self, what):
        self.tell(what)
        return float(self.answer(is_number))


def main():
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--bench", default=BUILT / "checkpoint_bench")
    parser.add_argument("--python", required=True, help="a Python with torch, and with deepspeed to compare it")
    parser.add_argument("--units", type=int, default=13)
    parser.add_argument("--elements", type=int, default=8 << 20, help="of a unit")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    folder = args.folder / "checkpoint-peers"
    shape = [args.units, args.elements]
    peers = {"torch.distributed.checkpoint": ["torch", folder / "torch", *shape],
             "the same, 2 threads": ["torch", folder / "torch2", *shape, 2],
             "DeepSpeed": ["deepspeed", folder / "deepspeed", *shape]}
    if subprocess.run([args.python, "-c", "import deepspeed"], capture_output=True, env=os.environ | ON_CPU).returncode:
        del peers["DeepSpeed"]
        print("this Python has no deepspeed: its rows are left out")
    print("load before: " + " ".join(f"{value:.1f}" for value in os.getloadavg()))
    programs = {name: Program([args.python, HERE / "peers/checkpoints.py", *command]) for name, command in peers.items()}
    for program in programs.values():
        program.answer(lambda line: line.strip() == "ready")
    ebb = Program([args.bench, args.folder, "commands", "--units", args.units, "--elements", args.elements])
    names = ["Ebb", *peers, "disk"]
    seconds = {name: {"save": [], "load": []} for name in names}
    for turn in range(1 + args.rounds):
        for what, of_disk in [("save", "write"), ("load", "read")]:
            for name in in_turn(names, turn):
                took = programs.get(name, ebb).seconds_of(of_disk if name == "disk" else what)
                if turn > 0:
                    seconds[name][what].append(took)
    for program in [ebb, *programs.values()]:
        program.close()
    shutil.rmtree(folder)
    gigabytes = 12 * args.units * args.elements / 1e9
    print(f"{gigabytes:.2f} GB of states")
    print_head("", "save, s", "GB/s", "Ebb's rate over it", "load, s", "GB/s", "Ebb's rate over it")
    for name in names:
        cells = [name]
        for what in ["save", "load"]:
            median = statistics.median(seconds[name][what])
            ratio = median_ratio(seconds[name][what], seconds["Ebb"][what])
            cells += [f"{median:.2f}", f"{gigabytes / median:.2f}", f"{ratio:.2f}"]
        print_row(*cells)


if __name__ == "__main__":
    main()
