#!/usr/bin/env python3
"""Line coverage by folder: builds with gcov into build/coverage, runs the test programs, prints a table.

    tests/coverage.py [PROGRAM...] [--jobs N] [--no-build]

Without names all programs of ctest run, with names those alone; counts of earlier runs are dropped. Lines of a header are covered where any
file that includes it has run them. What a killed process or one that ends by _exit has run is not counted.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/coverage"
ROOMS = ("sharding", "runtime", "offload", "optim", "examples")


def room(path):
    parts = path.parts
    return "/".join(parts[:2] if parts[0] in ("runtime", "examples") else parts[:1])


def build(programs, jobs):
    flags = "--coverage -fprofile-update=atomic"
    subprocess.run(["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1",
                    f"-DCMAKE_CXX_FLAGS={flags}", "-DEBB_BENCH=OFF"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD, f"-j{jobs}", *(["--target", *programs] if programs else [])], check=True)


def run(programs, jobs):
    for counts in BUILD.rglob("*.gcda"):
        counts.unlink()
    chosen = ["-L", f"^({'|'.join(programs)})$"] if programs else []
    done = subprocess.run(["ctest", "--test-dir", BUILD, f"-j{jobs}", "--no-tests=error", "--output-on-failure", *chosen])
    return done.returncode


def lines_run():
    """By file: how often each line ran, over all objects."""
    lines = collections.defaultdict(lambda: collections.defaultdict(int))
    notes = [str(path) for path in BUILD.rglob("*.gcno")]
    for begin in range(0, len(notes), 50):
        printed = subprocess.run(["gcov", "--json-format", "--stdout", *notes[begin:begin + 50]], cwd=BUILD, check=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        for document in printed.decode().splitlines():
            if not document.startswith("{"):
                continue
            for file in json.loads(document)["files"]:
                path = pathlib.Path(os.path.realpath(BUILD / file["file"]))
                if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS:
                    of_file = lines[path.relative_to(ROOT)]
                    for line in file["lines"]:
                        of_file[line["line_number"]] += line["count"]
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--no-build", action="store_true")
    args = parser.parse_args()
    if not args.no_build:
        build(args.programs, args.jobs)
    failed = run(args.programs, args.jobs)
    lines, covered = collections.Counter(), collections.Counter()
    for path, counts in lines_run().items():
        lines[room(path)] += len(counts)
        covered[room(path)] += sum(count > 0 for count in counts.values())
    lines["all"], covered["all"] = lines.total(), covered.total()
    print(f"{'folder':<24} {'lines':>7} {'run':>7} {'':>7}")
    for folder in sorted(lines, key=lambda name: (name == "all", name)):
        print(f"{folder:<24} {lines[folder]:>7} {covered[folder]:>7} {100 * covered[folder] / lines[folder]:>6.1f}%")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
