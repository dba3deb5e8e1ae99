#!/usr/bin/env python3
"""Programs that use DeepSpeed, over Ebb (`python -m ebb.deepspeed`) and over DeepSpeed itself, on this machine's CPU: one table.

    bench/deepspeed_programs/run.py [--only WORD ...] [--environments FOLDER] [--library FILE] [--output FILE.csv] [--doors ebb,deepspeed]

Each program is a file of this folder or a command of another package, with a tiny random model. An environment is made from PyPI's
packages once, and stays in FOLDER (default build/python/deepspeed_programs); after that nothing is downloaded. A row has the largest relative differences of losses, gradient
norms and evaluation losses between the two, the peak of rank 0's memory with all libraries in it, and the seconds of training. Where
DeepSpeed has no answer on a CPU, the row says so."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE.parent))
from turns import environments_of

ENVIRONMENTS = {
    "newest": ["torch==2.15.0", "transformers==5.24.0", "accelerate==1.15.0", "trl==1.16.0", "peft==0.21.2", "deepspeed==0.19.8", "datasets==5.2.0"],
}
SECONDS_MAX = 600


class Row(NamedTuple):
    program: str
    ranks: int
    case: dict[str, Any]
    environment: str = "newest"

    @property
    def name(self) -> str:
        return " ".join([self.program, f"ranks={self.ranks}", *(f"{key}={value}" for key, value in self.case.items() if key != "json"),
                         *self.case.get("json", {})])


def rows() -> Iterator[Row]:
    for stage in (1, 2, 3):
        for ranks in (1, 2):
            yield Row("initialize", ranks, {"stage": stage, "accumulate": 2})
    warmup = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-3, "total_num_steps": 8}}}
    yield Row("initialize", 2, {"stage": 2, "json": warmup})
    for dtype in ("bf16", "fp16"):
        for stage in (2, 3):
            yield Row("initialize", 2, {"stage": stage, "dtype": dtype})
    for stage in (2, 3):
        for program in ("accelerate_loop", "trainer"):
            yield Row(program, 2, {"stage": stage})
        for kind in ("sft", "dpo", "reward", "grpo"):
            yield Row("trl_trainers", 2, {"kind": kind, "stage": stage})
            yield Row("trl_trainers", 2, {"kind": kind, "stage": stage, "lora": True})



def environment_of(name: str, folder: Path) -> Path:
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name]], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    return python


def run(row: Row, door: str, python: Path, library: str) -> dict[str, Any]:
    """The numbers that the program says; or "error", its last lines."""
    environment = {
        **os.environ, "CASE": json.dumps(row.case), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    command = [str(python), str(HERE / f"{row.program}.py")]
    if door == "ebb":
        command[1:1] = ["-m", "ebb.deepspeed"]
        environment.update(EBB_LIBRARY=library, PYTHONPATH=str(ROOT / "runtime" / "python"))
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}" for rank in range(row.ranks)]
        ranks = [
            subprocess.Popen(command, env={**environment, **of_rank}, stdout=output.open("w"), stderr=subprocess.STDOUT, cwd=folder)
            for output, of_rank in zip(outputs, environments_of(row.ranks))
        ]
        codes: list[int | None] = [None] * row.ranks
        end = time.monotonic() + SECONDS_MAX
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.2)
            codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
        failed = next((at for at, code in enumerate(codes) if code), 0)
        lines = outputs[failed].read_text(errors="replace").splitlines()
    if None in codes and not any(codes):
        return {"error": "\n".join([*lines, f"not done after {SECONDS_MAX} s"])}
    found = [line for line in lines if line.startswith("RESULT ")]
    if any(codes) or not found:
        return {"error": "\n".join(lines)}
    return json.loads(found[-1].removeprefix("RESULT "))


def difference(ours: list[float], theirs: list[float]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} of {len(theirs)}"
    if not ours:
        return "-"
    return f"{max(abs(one - other) / max(abs(other), 1e-12) for one, other in zip(ours, theirs)):.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that the row's name has")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "python" / "deepspeed_programs")
    parser.add_argument("--library", default=str(ROOT / "build" / "release" / "runtime" / "c" / "libebb.so.1"))
    parser.add_argument("--doors", default="ebb,deepspeed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    written = []
    print(f"{'program':48} {'loss':>8} {'norm':>8} {'evaluation':>10} {'first':>9} {'last':>9}  MiB ebb/ds   s ebb/ds")
    for row in (one for one in rows() if all(word in one.name.split() for word in options.only)):
        python = environment_of(row.environment, options.environments)
        results = {}
        for door in options.doors.split(","):
            results[door] = run(row, door, python, options.library)
            if "error" in results[door]:
                print(f"{row.name}: {door} has no numbers:\n" + "\n".join("    " + line for line in results[door]["error"].splitlines()[-25:]), flush=True)
        ours, theirs = results.get("ebb", {}), results.get("deepspeed", {})
        one = ours or theirs
        if "error" in one or "error" in theirs and not ours:
            continue
        cells = [row.name, *(difference(ours[key], theirs[key]) if key in ours and key in theirs else "-" for key in ("losses", "norms", "evaluations"))]
        cells += [f"{one['losses'][0]:.6f}", f"{one['losses'][-1]:.6f}"]
        cells += ["/".join(f"{each.get('peak', 0) / 2**20:.0f}" for each in (ours, theirs)), "/".join(f"{each.get('seconds', 0):.2f}" for each in (ours, theirs))]
        print(f"{cells[0]:48} {cells[1]:>8} {cells[2]:>8} {cells[3]:>10} {cells[4]:>9} {cells[5]:>9} {cells[6]:>12} {cells[7]:>11}", flush=True)
        written.append(cells)
    if options.output:
        with options.output.open("w", newline="") as file:
            csv.writer(file).writerows([["program", "loss", "norm", "evaluation", "first", "last", "peak_mib", "seconds"], *written])
    return 0


if __name__ == "__main__":
    sys.exit(main())
