#!/usr/bin/env python3
"""Ebb's transfers, fio's (io_uring) and DeepSpeed's aio (libaio) at the same block size and depth, in turns: O_DIRECT,
one file, one thread.

    bench/io_against_peers.py PATH [--bytes 1073741824] [--block-size 1048576] [--queue-depth 32] [--rounds 5]
                              [--python PYTHON_WITH_DEEPSPEED]

Figures are medians over the rounds. fio's buffers lie in huge pages if this machine lets us reserve some (root;
/proc/sys/vm/nr_hugepages), else in small pages, and a line says so. Small pages are slow on a virtual disk, because a
request has a segment for each contiguous piece of memory. fio is measured with and without registered buffers and
files, DeepSpeed's aio with and without overlap_events, each in its own pinned memory and in the same memory made into
huge pages (Linux 6.1). The best of each direction counts.
"""

import functools
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile

from turns import BUILT, HERE, Peer, is_number, output, parser_of, print_head, print_row

HUGE_PAGES = pathlib.Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGE_BYTES = 2 << 20


def ebb(args):
    row = json.loads(output([args.io_bench, args.path, "--json", "--block-size", args.block_size, "--queue-depth",
                             args.queue_depth, "--files", 1, "--bytes", args.bytes, "--seconds", 0]))
    return {"write": row["write"], "read": row["read"], "description": row["description"]}


def fio(args, folder, memory, registered):
    rates = {}
    for direction in ["write", "read"]:
        report = json.loads(output(
            ["fio", "--name=fio", f"--filename={folder}/fio", f"--size={args.bytes}", f"--rw={direction}",
             f"--bs={args.block_size}", f"--iodepth={args.queue_depth}", "--ioengine=io_uring", "--direct=1",
             f"--mem={memory}", f"--fixedbufs={registered}", f"--registerfiles={registered}", "--loops=3",
             "--output-format=json"]))
        rates[direction] = report["jobs"][0][direction]["bw_bytes"]
    return rates


class DeepSpeed(Peer):
    def __init__(self, args, folder):
        super().__init__([args.python, HERE / "peers/aio.py", folder + "/aio", args.bytes, args.block_size, args.queue_depth],
                         DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", "cpu"))
        self.huge_pages = self.answer(lambda line: line.startswith("ready")) == "ready"

    def rates(self, overlap, huge):
        rates = {}
        for direction in ["write", "read"]:
            self.tell(f"{direction} {overlap} {huge} 3")
            rates[direction] = float(self.answer(is_number))
        return rates


def reserve_huge_pages(count):
    """Returns the number before, or None if huge pages cannot be reserved."""
    try:
        before = int(HUGE_PAGES.read_text())
        HUGE_PAGES.write_text(str(before + count))
        if int(HUGE_PAGES.read_text()) >= before + count:
            return before
        HUGE_PAGES.write_text(str(before))
    except OSError:
        pass
    return None


def main():
    parser = parser_of(__doc__)
    parser.add_argument("path")
    parser.add_argument("--io-bench", default=BUILT / "io_bench")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--block-size", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", help="a Python with torch and deepspeed (its aio needs libaio's headers); "
                                         "default: without")
    args = parser.parse_args()
    if not shutil.which("fio"):
        sys.exit("fio is not installed (Debian and Ubuntu: apt-get install fio)")
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    # Twice what the buffers need: fio rounds and aligns them.
    pages = 2 * args.block_size * args.queue_depth // HUGE_PAGE_BYTES + 8
    before = reserve_huge_pages(pages)
    memory = "shmhuge" if before is not None else "mmap"
    print(f"fio's buffers: {'huge pages' if before is not None else 'small pages: no huge ones can be reserved here'}")
    try:
        with tempfile.TemporaryDirectory(dir=args.path) as folder:
            programs = {"Ebb": lambda: ebb(args), "fio": lambda: fio(args, folder, memory, 0),
                        "fio, registered": lambda: fio(args, folder, memory, 1)}
            fio(args, folder, memory, 0)  # makes its file
            deepspeed = DeepSpeed(args, folder) if args.python else None
            if deepspeed:
                for huge in range(1 + deepspeed.huge_pages):
                    for overlap in range(2):
                        name = ("DeepSpeed aio" + (", overlap" if overlap else "") +
                                (", huge pages" if huge else ""))
                        programs[name] = functools.partial(deepspeed.rates, overlap, huge)
                deepspeed.rates(1, 0)  # makes its file
            rows = {name: [] for name in programs}
            for _ in range(args.rounds):
                for name, program in programs.items():
                    rows[name].append(program())
            if deepspeed:
                deepspeed.close()
    finally:
        if before is not None:
            HUGE_PAGES.write_text(str(before))
    print(f"load before: {load}; Ebb: {rows['Ebb'][0]['description']}; block size {args.block_size}, depth {args.queue_depth}, "
          f"{args.bytes >> 20} MiB, medians of {args.rounds} turns, GB/s")
    medians = {name: {direction: statistics.median(row[direction] for row in of_name)
                      for direction in ["write", "read"]} for name, of_name in rows.items()}
    print_head("", "write GB/s", "read GB/s")
    for name, rates in medians.items():
        print_row(name, f"{rates['write'] / 1e9:.2f}", f"{rates['read'] / 1e9:.2f}")
    peers = {"fio": [name for name in medians if name.startswith("fio")],
             "DeepSpeed's aio": [name for name in medians if name.startswith("DeepSpeed")]}
    for peer, names in peers.items():
        if names:
            write, read = (medians["Ebb"][direction] / max(medians[name][direction] for name in names)
                           for direction in ["write", "read"])
            print_row(f"**Ebb over the best of {peer}**", f"**{write:.2f}**", f"**{read:.2f}**")


if __name__ == "__main__":
    main()
