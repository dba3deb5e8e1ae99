#!/usr/bin/env python3
"""Ebb's transfers and fio's (io_uring, O_DIRECT, one file, one job) at the same block size and depth, in turns.

    bench/io_against_fio.py PATH [--bytes 1073741824] [--block-size 1048576] [--queue-depth 32] [--rounds 5]

Medians over the rounds. fio's buffers lie in huge pages when this machine lets us reserve some for the while
(root; /proc/sys/vm/nr_hugepages), else in small ones, which is said: a virtual disk's request carries a
segment for each contiguous piece of memory, so they cost much. fio is measured with registered buffers and
files and without; the better counts, for each direction by itself.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
HUGE_PAGES = pathlib.Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGE_BYTES = 2 << 20


def run(command):
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def ebb(args):
    row = json.loads(run([args.io_bench, args.path, "--json", "--block-size", args.block_size, "--queue-depth",
                          args.queue_depth, "--bytes", args.bytes, "--seconds", 0]))
    return {"write": row["write"], "read": row["read"], "description": row["description"]}


def fio(args, folder, memory, registered):
    rates = {}
    for direction in ["write", "read"]:
        report = json.loads(run(
            ["fio", "--name=fio", f"--filename={folder}/fio", f"--size={args.bytes}", f"--rw={direction}",
             f"--bs={args.block_size}", f"--iodepth={args.queue_depth}", "--ioengine=io_uring", "--direct=1",
             f"--mem={memory}", f"--fixedbufs={registered}", f"--registerfiles={registered}", "--loops=3",
             "--output-format=json"]))
        rates[direction] = report["jobs"][0][direction]["bw_bytes"]
    return rates


def reserve_huge_pages(count):
    """Returns how many there were, or None where they cannot be had."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--io-bench", default=HERE.parent / "build/release/bin/io_bench")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--block-size", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not shutil.which("fio"):
        sys.exit("fio is not installed (Debian and Ubuntu: apt-get install fio)")
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
            rows = {name: [] for name in programs}
            for _ in range(args.rounds):
                for name, program in programs.items():
                    rows[name].append(program())
    finally:
        if before is not None:
            HUGE_PAGES.write_text(str(before))
    print(f"Ebb: {rows['Ebb'][0]['description']}; block size {args.block_size}, depth {args.queue_depth}, "
          f"{args.bytes >> 20} MiB, medians of {args.rounds} turns, GB/s")
    medians = {name: {direction: statistics.median(row[direction] for row in of_name)
                      for direction in ["write", "read"]} for name, of_name in rows.items()}
    print(f"{'':<18}{'write':>8}{'read':>8}")
    for name, rates in medians.items():
        print(f"{name:<18}{rates['write'] / 1e9:>8.2f}{rates['read'] / 1e9:>8.2f}")
    ratio = {direction: medians["Ebb"][direction] / max(rates[direction] for name, rates in medians.items() if name != "Ebb")
             for direction in ["write", "read"]}
    print(f"{'Ebb / better fio':<18}{ratio['write']:>8.3f}{ratio['read']:>8.3f}")


if __name__ == "__main__":
    main()
