#!/usr/bin/env python3
"""All-gather and reduce-scatter (fp32) between two processes: Ebb's, Open MPI's and gloo's, in turns.

    bench/collectives_against_peers.py [--python PYTHON_WITH_TORCH] [--bytes 67108864] [--rounds 5]

algbw and busbw are those of nccl-tests: bytes of the whole buffer over the time, and that times (N - 1) / N. In place: a
rank's own block already lies in its place. Figures are medians over the rounds of each run's median. A library that is not
installed is left out, and a line says so: Open MPI needs mpicxx and mpirun, gloo a Python with torch.

Open MPI copies its caller's memory from malloc. If /sys/kernel/mm/transparent_hugepage/enabled is madvise, this memory has
small pages. A second row has huge pages (glibc's malloc asks for them). Ebb's buffers have huge pages unless shmem_enabled
there is never or deny. A copy: both ranks copy as many bytes as the operation reads and writes (comm_bench). To be three
times as fast as a library with time t, a program has to stay below t / 3.
"""

import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile

from turns import BUILT, HERE, in_turn, output, parser_of, print_head, print_row

ITERATIONS = 10


def quiet(command, **environment):
    return json.loads(output(command, stderr=subprocess.DEVNULL, **environment))


def ebb(args):
    report = quiet([args.comm_bench, "--benchmark_format=json", "--benchmark_filter="
                    f"^(AllGather/bytes:{args.bytes}|ReduceScatterFp32/bytes:{args.bytes}/ranks:2/in_place:0)/.*processes:1"])
    seconds, copy_seconds = {}, {}
    for row in report["benchmarks"]:
        name = "all_gather" if row["name"].startswith("AllGather") else "reduce_scatter"
        name += "_in_place" if "in_place:1" in row["name"] else ""
        seconds[name] = args.bytes / (row["algbw_GB/s"] * 1e9)
        copy_seconds[name] = seconds[name] * row["of_copy"]
    return {"Ebb": seconds, "a copy": copy_seconds}


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--comm-bench", default=BUILT / "comm_bench")
    parser.add_argument("--python", help="a Python with torch")
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        programs = {"Ebb": lambda: ebb(args)}
        results = {"Ebb": [], "a copy": []}
        if shutil.which("mpicxx") and shutil.which("mpirun"):
            program = pathlib.Path(folder) / "mpi_collectives"
            subprocess.run(["mpicxx", "-O2", "-std=c++17", HERE / "peers/mpi_collectives.cc", "-o", program], check=True)

            def open_mpi(name, **environment):
                return {name: quiet(["mpirun", "--oversubscribe", "-n", 2, program, args.bytes, ITERATIONS],
                                     OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", **environment)}

            programs["Open MPI"] = lambda: open_mpi("Open MPI")
            programs["Open MPI, huge pages"] = lambda: open_mpi("Open MPI, huge pages", GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
        else:
            print("Open MPI is left out: mpicxx or mpirun is not installed")
        if args.python:
            programs["gloo"] = lambda: {"gloo": quiet(
                [args.python, HERE / "peers/gloo_collectives.py", args.bytes, ITERATIONS])}
        else:
            print("gloo is left out: no --python")
        for turn in range(args.rounds):
            for name in in_turn(programs, turn):
                for library, seconds in programs[name]().items():
                    results.setdefault(library, []).append(seconds)
    print_head("operation", "library", "ms", "algbw GB/s", "busbw GB/s", "Ebb is faster by")
    for operation in ("all_gather", "all_gather_in_place", "reduce_scatter"):
        ours = statistics.median(row[operation] for row in results["Ebb"])
        for name, rows in results.items():
            seconds = statistics.median(row[operation] for row in rows)
            bandwidth = args.bytes / seconds / 1e9
            print_row(operation, name, f"{seconds * 1e3:.2f}", f"{bandwidth:.2f}", f"{bandwidth / 2:.2f}",
                      f"{seconds / ours:.1f}")


if __name__ == "__main__":
    main()
