#!/usr/bin/env python3
"""Does the suite notice when the library is wrong? Changes one place of one file at a time, and prints which changes a test notices.

    tests/mutate.py [--count 200] [--seed 1] [--first 0] [--under FOLDER]... [--build build/release]

A change is a comparison, an operator or a constant replaced, a call or a wait left out; as many of each kind. The same seed draws the same
changes of the same sources. --first and --count cut a long run into pieces. Nothing in the tree or in the build folder, which must be built with
-DEBB_UNITY=OFF, is touched: the changed file is compiled apart, and each test program of its room that has a function of it is linked once
more with that object before the libraries. A change is noticed when one of them fails, or takes ten times as long as it did and 20 s.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Where the tests of a room are, the nearest first.
ROOMS = {
    "sharding": ["sharding", "planner"],
    "runtime/engine": ["engine", "cuda"],
    "runtime/comm": ["comm", "cuda"],
    "runtime/device": ["device", "cuda"],
    "runtime/kernels": ["comm", "optim", "cuda", "offload"],
    "runtime/base": ["config", "sharding"],
    "runtime/config": ["config"],
    "runtime/checkpoint": ["checkpoint"],
    "runtime/planner": ["planner"],
    "runtime/trace": ["trace", "engine"],
    "offload": ["offload", "engine"],
    "optim": ["optim", "cuda", "engine"],
}
SWAPS = {
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "operator": {"+": "-", "-": "+", "*": "+", "/": "*", "%": "+", "&&": "||", "||": "&&", "+=": "-=", "-=": "+="},
}
CALL = re.compile(r"^\s+(?:[\w\]\[*()]+(?:\.|->|::))*(\w+)\(.*\);$")
NO_CALL = re.compile(r"^\s*(return|co_return|delete|using|static_assert|assert|if|for|while|else|explicit|HWY_\w+)\b")
Site = collections.namedtuple("Site", "kind file line before after")


def sites_of(file):
    """Every place of a file that can be changed."""
    for number, line in enumerate((ROOT / file).read_text().splitlines()):
        code = re.sub(r"//.*", "", re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', lambda m: " " * len(m.group()), line))
        if not code.strip() or code.lstrip().startswith(("#", "template", "using", "static_assert", "namespace")):
            continue
        call = CALL.match(line)
        if call and line.count("(") == line.count(")") and not NO_CALL.match(line):
            kind = "wait" if re.search("[Ww]ait|Record|Synchronize|Fence|notify", line) else "call"
            yield Site(kind, file, number, line, re.match(r"\s*", line).group() + ";")
        for kind, swaps in SWAPS.items():
            for match in re.finditer(r"(?<= )([<>=!+\-*/%&|]{1,2})(?= )", code):
                if match.group() in swaps:
                    yield Site(kind, file, number, line, line[:match.start()] + swaps[match.group()] + line[match.end():])
        for match in re.finditer(r"(?<![\w.'])\d+(?![\w.'])", code):
            yield Site("constant", file, number, line, line[:match.start()] + str(int(match.group()) + 1) + line[match.end():])


def draw(under, seed):
    """All places in the order in which they are tried: a kind after the other, in turns."""
    files = subprocess.run(["git", "ls-files", *(f"{room}/*.cc" for room in under)], cwd=ROOT, check=True,
                           stdout=subprocess.PIPE).stdout.decode().split()
    by_kind = collections.defaultdict(list)
    for file in files:
        for site in sites_of(file):
            by_kind[site.kind].append(site)
    generator = random.Random(seed)
    kinds = sorted(by_kind)
    for kind in kinds:
        generator.shuffle(by_kind[kind])
    return [by_kind[kind][i] for i in range(max(map(len, by_kind.values()))) for kind in kinds if i < len(by_kind[kind])]


def ends(command, seconds, **options):
    """Its exit status, or None if it took longer."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


class Build:
    def __init__(self, folder, scratch):
        self.folder, self.scratch = folder, scratch
        self.compiles, self.took = {}, {}
        for entry in json.loads(self.ninja("compdb")):
            if not entry["output"].startswith("tests/") and " -c " in entry["command"]:
                self.compiles.setdefault(os.path.realpath(os.path.join(folder, entry["file"])), entry)

    def ninja(self, tool, *arguments):
        return subprocess.run(["ninja", "-C", self.folder, "-t", tool, *arguments], check=True, stdout=subprocess.PIPE).stdout.decode()

    @functools.cache
    def programs(self, tests):
        known = {line.partition(":")[0] for line in self.ninja("targets", "all").splitlines()}
        return [path.name for path in sorted((self.folder / "bin").glob("*_test"))
                if f"bin/{path.name}" in known and f" tests/{tests}/" in self.link(path.name)]

    @functools.cache
    def link(self, program):
        return self.ninja("commands", "-s", f"bin/{program}").splitlines()[-1]

    @functools.cache
    def functions(self, file):
        text = subprocess.run(["nm", "--defined-only", file], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.decode()
        return frozenset(words[2] for words in map(str.split, text.splitlines()) if len(words) == 3 and words[1] == "T")

    def seconds(self, program):
        """How long it takes as it is; None: it does not pass here."""
        if program not in self.took:
            begin = time.monotonic()
            passed = self.run(self.folder / "bin" / program, 300) == 0
            self.took[program] = time.monotonic() - begin if passed else None
        return self.took[program]

    def run(self, program, seconds):
        with tempfile.TemporaryDirectory() as folder:
            return ends([program], seconds, cwd=folder, env=os.environ | {"GTEST_FAIL_FAST": "1", "GTEST_BRIEF": "1"})

    def covering(self, file):
        """The test programs of a file, those of its name first, then those that are known to be quick."""
        object_file = self.folder / self.compiles[os.path.realpath(ROOT / file)]["output"]
        room = next(room for room in ROOMS if file.startswith(room + "/"))
        stem = pathlib.Path(file).stem
        for tests in ROOMS[room]:
            names = [name for name in self.programs(tests)
                     if self.functions(object_file) & self.functions(self.folder / "bin" / name)]
            names.sort(key=lambda name: (stem not in name, self.took.get(name) or 1, name))
            yield from (name for name in names if self.seconds(name) is not None)

    def compile(self, site):
        """The changed object; None: it is not C++."""
        lines = (ROOT / site.file).read_text().splitlines()
        assert lines[site.line] == site.before
        lines[site.line] = site.after
        # A folder before all others, because Highway includes a file once more by its name.
        changed = self.scratch / "include/ebb" / site.file
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text("\n".join(lines) + "\n")
        entry = self.compiles[os.path.realpath(ROOT / site.file)]
        words = shlex.split(entry["command"].split(" && ")[0])
        words = [word for word in words if not word.endswith("ccache")]
        words[words.index("-c") + 1] = str(changed)
        words[words.index("-o") + 1] = str(self.scratch / "changed.o")
        words[1:1] = ["-w", "-I", str(self.scratch / "include"), "-iquote", str((ROOT / site.file).parent)]
        ended = ends([word for word in words if word != "-Werror"], 600, cwd=self.folder)
        changed.unlink()
        return self.scratch / "changed.o" if ended == 0 else None

    def noticed(self, changed, program):
        words = shlex.split(self.link(program).removeprefix(": && ").removesuffix(" && :"))
        out = words.index("-o") + 1
        words[out] = str(self.scratch / program)
        words.insert(out + 1, str(changed))
        if ends(words, 300, cwd=self.folder) != 0:
            return False
        ended = self.run(self.scratch / program, 10 * self.seconds(program) + 20)
        (self.scratch / program).unlink()
        return ended not in (0, 77)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--under", action="append")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    args = parser.parse_args()
    noticed, tried = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as scratch:
        build = Build(args.build.resolve(), pathlib.Path(scratch))
        places = draw(args.under or list(ROOMS), args.seed)
        for number, site in enumerate(places[args.first:args.first + args.count], args.first):
            known = os.path.realpath(ROOT / site.file) in build.compiles
            changed = build.compile(site) if known else None
            if changed is None:
                print(f"{number:>4} not C++  {site.file}:{site.line + 1}", flush=True)
                continue
            by = next((name for name in build.covering(site.file) if build.noticed(changed, name)), None)
            for key in (site.kind, "all"):
                tried[key] += 1
                noticed[key] += by is not None
            print(f"{number:>4} {'noticed by ' + by if by else 'NOT NOTICED'}: {site.kind} {site.file}:{site.line + 1}: "
                  f"{site.before.strip()} -> {site.after.strip()}", flush=True)
    for kind in sorted(tried, key=lambda name: (name == "all", name)):
        print(f"{kind:<12} {noticed[kind]:>4} of {tried[kind]:>4} noticed, {100 * noticed[kind] / tried[kind]:.0f}%")


if __name__ == "__main__":
    main()
