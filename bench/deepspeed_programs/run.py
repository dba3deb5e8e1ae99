#!/usr/bin/env python3
"""Programs that use DeepSpeed, over Ebb (`python -m ebb.deepspeed`) and over DeepSpeed itself, on this machine's CPU: one table.

    bench/deepspeed_programs/run.py [--only WORD ...] [--rounds N] [--environments FOLDER] [--library FILE] [--output FILE.csv] [--doors ebb,deepspeed]
    bench/deepspeed_programs/run.py --install                             # makes the environments, and ends

Each program is a file of this folder or a command of another package, with a tiny random model. An environment is made from PyPI's
packages once, and stays in FOLDER (default build/python/deepspeed_programs); after that nothing is downloaded. A row has the largest
relative differences of losses, gradient norms and evaluation losses between the two, the first and the last loss, the largest peak of a
process's memory with all libraries in it, and the seconds of a training step. The two take turns, in `--rounds` rounds, and times are
medians. GRPO's losses are compared up to the first step in which a model has written another token. Where DeepSpeed has no answer on
a CPU, the row says so. With `--doors ebb,torch` transformers' and TRL's trainers are compared with torch's data parallelism instead.
The exit status is 1 if a program had no numbers over Ebb, or fp32 losses that differ by more than 2e-6."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.append(str(HERE.parent))
from turns import environments_of, in_turn

ENVIRONMENTS = {
    "newest": ["torch==2.15.0", "transformers==5.24.0", "accelerate==1.15.0", "trl==1.16.0", "peft==0.21.2", "deepspeed==0.19.8", "datasets==5.2.0"],
    "llamafactory": ["torch==2.15.0", "llamafactory==0.9.5", "transformers==5.6.0", "accelerate==1.11.0", "trl==0.24.0", "peft==0.18.1", "deepspeed==0.19.8"],
    "swift": ["torch==2.15.0", "ms-swift==4.6.0", "transformers==5.19.0", "accelerate==1.11.0", "trl==0.29.1", "peft==0.20.0", "deepspeed==0.19.8"],
    "axolotl": ["torch==2.13.0", "axolotl==0.19.0", "transformers==5.16.1", "accelerate==1.11.0", "trl==1.9.0", "peft==0.20.0", "deepspeed==0.19.8"],
    "lightning": ["torch==2.15.0", "lightning==2.6.6", "deepspeed==0.19.8"],
}
OF_DEEPSPEED = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
UV = "uv==0.13.9"
NEWEST = "2026-11-28"  # packages that these need are of this day, too
SECONDS_MAX = 1800
ENGINE = re.compile(r"ebb info: engine\d*: \d+ ranks? ")  # in the log
LOSS_MAX = 2e-6  # relative, fp32
OF_TORCH = ("trainer", "trl_trainers")  # programs that also train without DeepSpeed
COMMANDS = ("llamafactory", "swift", "axolotl")  # environments whose programs are commands of the package


class Row(NamedTuple):
    program: str
    ranks: int
    case: dict[str, Any]
    environment: str = "newest"

    @property
    def words(self) -> list[str]:
        """That --only may ask for: stage=2, sft, lora, ..."""
        return [*self.name.split(), *(value for value in self.case.values() if isinstance(value, str)), *self.case]

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
        for package in ("llamafactory", "swift", "axolotl"):
            for kind, lora in (("sft", False), ("sft", True), ("dpo", False), ("dpo", True)):
                yield Row(package, 2, {"kind": kind, "stage": stage, **({"lora": True} if lora else {})}, package)
        for kind in ("fabric", "trainer"):
            yield Row("lightning_programs", 2, {"kind": kind, "stage": stage}, "lightning")


def environment_of(name: str, folder: Path) -> Path:
    """The Python of an environment. It is made if it is not there, with links into a cache beside it, so that torch is on the disk once."""
    folder = folder.absolute()
    python, done = folder / name / "bin" / "python", folder / name / "packages.txt"
    if done.exists() and done.read_text().split() == ENVIRONMENTS[name]:
        return python
    uv = folder / "uv" / "bin" / "uv"
    if not uv.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "uv")], check=True)
        subprocess.run([str(folder / "uv" / "bin" / "python"), "-m", "pip", "install", "--quiet", UV], check=True)
    options = {"env": {**os.environ, **OF_DEEPSPEED, "UV_CACHE_DIR": str(folder / "cache"), **extensions_of(python)}, "check": True}
    subprocess.run([str(uv), "venv", "--quiet", "--clear", "--python", sys.executable, str(folder / name)], **options)
    listed = folder / name / "requirements.txt"  # also as overrides: axolotl asks for an accelerate that counts one process where there is no GPU
    listed.write_text("\n".join(ENVIRONMENTS[name]) + "\n")
    install = [str(uv), "pip", "install", "--quiet", "--exclude-newer", NEWEST, "--python", str(python), "--overrides", str(listed)]
    subprocess.run([*install, "--requirements", str(listed)], **options)
    # DeepSpeed's sums over ranks on a CPU are an operator that it compiles when it is first used: here, and not within a run.
    build = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    subprocess.run([str(python), "-c", build], stdout=subprocess.DEVNULL, **options)
    listed.rename(done)
    return python


def extensions_of(python: Path) -> dict[str, str]:
    """Where DeepSpeed keeps the operator that it compiles, and the programs that compile it."""
    return {"TORCH_EXTENSIONS_DIR": str(python.parent.parent / "extensions"), "PATH": f"{python.parent}:{os.environ['PATH']}"}


def run(row: Row, door: str, python: Path, library: str) -> dict[str, Any]:
    """The numbers that the program says; or "error", its last lines."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ, **OF_DEEPSPEED, **extensions_of(python), "CASE": json.dumps(row.case), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "SHARED_FOLDER": folder, "HF_HOME": folder, "MODELSCOPE_CACHE": folder, "TOKENIZERS_PARALLELISM": "false",
        }
        of_ranks = environments_of(row.ranks)
        if row.environment in COMMANDS:
            made = subprocess.run([str(python), str(HERE / "commands.py"), row.program], env=environment, cwd=folder, capture_output=True, text=True)
            if made.returncode:
                return {"error": made.stderr}
            described = json.loads(made.stdout.splitlines()[-1].removeprefix("COMMAND "))
            command = described["command"]
            of_ranks = [{**described["environment"], **{name: of_ranks[0][name] for name in ("MASTER_ADDR", "MASTER_PORT")}}]
        else:
            command = [str(HERE / f"{row.program}.py")]
        if door == "ebb":
            command = [str(python), "-m", "ebb.deepspeed", *command]
            environment.update(EBB_LIBRARY=library, PYTHONPATH=str(ROOT / "runtime" / "python"))
        elif row.environment not in COMMANDS:
            command = [str(python), *command]
        if door == "torch":
            if row.program not in OF_TORCH:
                return {"error": f"torch alone trains {' and '.join(OF_TORCH)}"}
            environment["WITHOUT_DEEPSPEED"] = "1"
        lines, peak, failed = finished(command, [{**environment, **of_rank} for of_rank in of_ranks], Path(folder))
        if failed:
            return {"error": "\n".join([*lines, failed])}
        if door == "ebb" and not any(ENGINE.search(line) for line in lines):
            return {"error": "\n".join([*lines, "it has ended without an engine of Ebb's"])}
        found = [line for line in lines if line.startswith("RESULT ")]
        if found:
            return {**json.loads(found[-1].removeprefix("RESULT ")), "peak": peak}
        states = sorted(Path(folder).glob("output/**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
        if row.environment in COMMANDS and states:
            return {**of_trainer_state(json.loads(states[-1].read_text())), "peak": peak}
        return {"error": "\n".join([*lines, "it has said no numbers"])}


def finished(command: list[str], environments: list[dict[str, str]], folder: Path) -> tuple[list[str], int, str]:
    """Lines of the first process, or of one that failed; the largest peak of a process in bytes; and why it failed."""
    outputs = [folder / f"output of rank {rank}" for rank in range(len(environments))]
    started = [
        subprocess.Popen(command, env=environment, stdout=output.open("w"), stderr=subprocess.STDOUT, cwd=folder, start_new_session=True)
        for output, environment in zip(outputs, environments)
    ]
    codes: list[int | None] = [None] * len(started)
    peak, end = 0, time.monotonic() + SECONDS_MAX
    try:
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.1)
            for at, process in enumerate(started):
                if codes[at] is None:
                    ended, status, used = os.wait4(process.pid, os.WNOHANG)
                    if ended:
                        codes[at] = process.returncode = os.waitstatus_to_exitcode(status)
                        peak = max(peak, used.ru_maxrss * 1024)
    finally:
        left = [process for process, code in zip(started, codes) if code is None]
        for process in left:
            os.killpg(process.pid, signal.SIGTERM)  # a launcher ends its ranks
        for process in left:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    which = next((at for at, code in enumerate(codes) if code), 0)
    why = f"rank {which} has ended with {codes[which]}" if any(codes) else f"not done after {SECONDS_MAX} s" if None in codes else ""
    return outputs[which].read_text(errors="replace").splitlines(), peak, why


def of_trainer_state(state: dict[str, Any]) -> dict[str, Any]:
    """What transformers' Trainer has written."""
    steps = [one for one in state["log_history"] if "loss" in one]
    return {
        "losses": [one["loss"] for one in steps], "norms": [float(one.get("grad_norm") or -1) for one in steps],
        "evaluations": [one["eval_loss"] for one in state["log_history"] if "eval_loss" in one],
        "seconds": next((one["train_runtime"] / len(steps) for one in state["log_history"] if "train_runtime" in one), 0.0),
    }


def steps_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> int | None:
    """Steps until a model has written another token: all, if programs do not say what was written."""
    pairs = list(zip(ours.get("written", []), theirs.get("written", [])))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None) if pairs else None


def difference(ours: list[float], theirs: list[float], steps: int | None = None) -> float | None:
    ours, theirs = ours[:steps], theirs[:steps]
    if len(ours) != len(theirs):
        raise SystemExit(f"{len(ours)} numbers beside {len(theirs)}")
    return max((abs(one - other) / max(abs(other), 1e-12) for one, other in zip(ours, theirs)), default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a row has: a program, stage=2, sft, lora, ...")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "python" / "deepspeed_programs")
    parser.add_argument("--library", default=str(ROOT / "build" / "release" / "runtime" / "c" / "libebb.so.1"))
    parser.add_argument("--doors", default="ebb,deepspeed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--install", action="store_true", help="make the environments, and end")
    options = parser.parse_args()
    asked = [row for row in rows() if all(word in row.words for word in options.only)]
    if not asked:
        parser.error(f"no row has all of {' '.join(options.only)}; rows have {' '.join(sorted({word for row in rows() for word in row.words}))}")
    pythons = {name: environment_of(name, options.environments) for name in dict.fromkeys(row.environment for row in asked)}
    if options.install:
        return 0
    doors, written, code = options.doors.split(","), [], 0
    print(f"{'program':48} {'loss':>8} {'norm':>8} {'evaluation':>10} {'first':>9} {'last':>9}  {'MiB':>9} {'s a step':>11}   ({'/'.join(doors)})")
    for row in asked:
        results: dict[str, list[dict[str, Any]]] = {door: [] for door in doors}
        for turn in range(options.rounds):
            for door in in_turn(doors, turn):
                results[door].append(run(row, door, pythons[row.environment], options.library))
        for door, rounds in results.items():
            if "error" in rounds[0]:
                print(f"{row.name}: {door} has no numbers:\n" + "\n".join("    " + line for line in rounds[0]["error"].splitlines()[-25:]), flush=True)
                code = code or (1 if door == "ebb" else 0)
        ours = results.get("ebb", [{}])[0]
        theirs = next((results[door][0] for door in doors if door != "ebb"), {})
        if "losses" not in (ours if "ebb" in doors else theirs):
            continue
        steps, cells = steps_alike(ours, theirs), [row.name]
        for key in ("losses", "norms", "evaluations"):
            apart = difference(ours[key], theirs[key], steps) if key in ours and key in theirs else None
            if key == "losses" and apart is not None and apart > LOSS_MAX and "dtype" not in row.case:
                code = 1
            cells.append("-" if apart is None else f"{apart:.1e}")
        one = ours or theirs
        cells += [f"{one['losses'][0]:.6f}", f"{one['losses'][-1]:.6f}"]
        cells.append("/".join(f"{max(each.get('peak', 0) for each in results[door]) / 2**20:.0f}" for door in doors))
        cells.append("/".join(f"{statistics.median(each.get('seconds', 0) for each in results[door]):.3f}" for door in doors))
        if steps is not None:
            cells[0] += f" (to step {steps})"
        print(f"{cells[0]:48} {cells[1]:>8} {cells[2]:>8} {cells[3]:>10} {cells[4]:>9} {cells[5]:>9} {cells[6]:>10} {cells[7]:>11}", flush=True)
        written.append(cells)
    if options.output:
        with options.output.open("w", newline="") as file:
            csv.writer(file).writerows([["program", "loss", "norm", "evaluation", "first", "last", "peak_mib", "seconds"], *written])
    return code


if __name__ == "__main__":
    sys.exit(main())
