#!/usr/bin/env python3
"""Models larger than one card: tokens a second, and what GPU, RAM and disk hold and move, of Ebb and of other programs in one table.

    bench/one_card/run.py --device cpu [--python PYTHON]                    every path on a tiny Llama with two ranks, without a GPU
    bench/one_card/run.py --device cuda --rows first [--python PYTHON]      nine rows; then second, and third: 4 minutes each at most
    bench/one_card/run.py --predict                                         ebb-plan's predictions of all rows; trains nothing

All train the same Llama of transformers in bf16 with fp32 masters, blocks that are recomputed in backward, AdamW and clipping at 1, under
one cap of device memory (pools and torch's together) and one of RAM (a system that takes more is ended); "without offload" has no cap of
the device. A row runs in a process of its own, one after another, and in turns if there are several rounds. PYTHON has torch,
transformers, ebb and the peers: bench/one_card/peers.sh makes such an environment, also from a folder of wheels where no network is.

FOLDER gets one_card.md (the table), one_card.csv, one_card.svg, one_card.json and a log of each row. All are written after each row, and
rows of earlier commands are kept, so the three commands fill one table. A row that has not run says why. --predict takes minutes, which a
command on a GPU does not have: run it before, on any machine, and take one_card.json along. Exit status: 0 if every row that was asked for has a figure or says
that it cannot run on this device."""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent)]

from cases import COMMAND_SECONDS, COMMANDS, ROWS, Row, settings_of
from predict import Planner
from report import measured_of, picture, table, write_csv
from turns import BUILT, Failed, Peer, environments_of, in_turn, parser_of

STEPS = 3
SECONDS_LEAST = 5  # a row is not started with fewer seconds left


class Table:
    """The rows of this folder, also those of earlier commands."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(folder / "lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"run.py: another run.py writes into {folder}, and rows of one would be lost: wait for it, or give another --output")
        self.path = folder / "one_card.json"
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.entries: dict[str, dict[str, Any]] = kept.get("rows", {})
        self.machines: dict[str, str] = kept.get("machines", {})

    def entry(self, row: Row) -> dict[str, Any]:
        return self.entries.setdefault(row.key, {})

    def write(self) -> None:
        text = json.dumps({"machines": self.machines, "rows": self.entries}, indent=1) + "\n"
        whole = self.path.with_suffix(".part")
        whole.write_text(text)
        whole.replace(self.path)
        (self.folder / "one_card.md").write_text(table(self.entries, self.machines))
        (self.folder / "one_card.svg").write_text(picture(self.entries))
        write_csv(self.folder / "one_card.csv", self.entries)


class Machine:
    """The processes that start ranks, which stay alive."""

    def __init__(self, options: Any, ranks: int):
        prefix = pathlib.Path(options.python).absolute().parent.parent
        # Where peers.sh has put libaio, which DeepSpeed loads, and links if it compiles its operator.
        found = {"LD_LIBRARY_PATH": "lib", "LIBRARY_PATH": "lib", "CPATH": "include"}
        self.options, self.threads = options, max(1, (os.cpu_count() or 1) // ranks)
        place = {
            "OMP_NUM_THREADS": str(self.threads), "DS_ACCELERATOR": options.device, "EBB_LOG_LEVEL": "warn", "TOKENIZERS_PARALLELISM": "false",
            "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": str(prefix / "extensions"),
            **{name: ":".join([str(prefix / folder), *filter(None, [os.environ.get(name)])]) for name, folder in found.items()},
        }
        self.ranks = [Peer([options.python, HERE / "rank.py"], **place) for _ in range(ranks)]
        said = [json.loads(self.answer(rank, "READY")) for rank in self.ranks][0]
        self.torch, self.gpus = said["torch"], said["gpus"]

    @staticmethod
    def answer(rank: Peer, word: str) -> str:
        return rank.answer(lambda line: line.startswith(word)).removeprefix(word)

    def run(self, row: Row, deadline: float, logs: pathlib.Path) -> dict[str, Any]:
        """What the table takes of it: "measured", or a "status" without figures."""
        name = row.key.replace(", ", "_").replace(" ", "-")
        with tempfile.TemporaryDirectory(dir=self.options.disk) as folder:
            jobs = [{
                "program": row.system.program, "stale": row.system.stale, "capped": row.capped, "device": row.device, "model": row.shape.config(),
                "batch": [row.micro_batch, row.shape.context], "micro_batches": row.micro_batches, "settings": settings_of(row, folder),
                "device_memory": row.device_memory, "host_memory": row.host_memory, "threads": self.threads, "steps": self.options.steps,
                "deadline": deadline, "rank": at, "ranks": row.ranks, "environment": environment, "folder": folder,
                "result": f"{logs / name}.{at}.json", "log": f"{logs / name}.{at}.log",
            } for at, environment in enumerate(environments_of(row.ranks))]
            for rank, job in zip(self.ranks, jobs):
                pathlib.Path(job["result"]).unlink(missing_ok=True)
                rank.tell(json.dumps(job))
            results = [json.loads(self.answer(rank, "RESULT")) for rank in self.ranks]
        for job in jobs:
            pathlib.Path(job["result"]).unlink(missing_ok=True)
        for result in results:
            if "not_run" in result:
                return {"status": f"not run: {result['not_run']}"}
            if "failed" in result:
                return {"status": f"failed: {result['failed']}"}
        return {"measured": measured_of(row, results)}

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def described(options: Any, torch: str) -> str:
    model = next((line.partition(": ")[2] for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "?")
    names = shutil.which("nvidia-smi") if options.device == "cuda" else None
    gpu = os.popen("nvidia-smi --query-gpu=name --format=csv,noheader").read().strip().splitlines()[:1] if names else []
    return f"{', '.join([*gpu, model])}, {os.cpu_count()} cores, torch {torch}, {time.strftime('%Y-%m-%d')}"


def best_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round with the median speed, of those with figures; otherwise the last error."""
    good = sorted((one for one in rounds if "measured" in one), key=lambda one: one["measured"]["tokens_per_second"])
    return good[(len(good) - 1) // 2] if good else rounds[-1]


def measure(options: Any, found: Table, rows: list[Row], begin: float) -> None:
    if not rows:
        return
    logs = found.folder / "logs"
    logs.mkdir(exist_ok=True)
    machine = Machine(options, rows[0].ranks)
    if options.device == "cuda" and not machine.gpus:
        for row in rows:
            found.entry(row).setdefault("status", "not run: no GPU")
        return machine.close()
    found.machines[options.device] = described(options, machine.torch)
    limit = begin + (options.time or (COMMAND_SECONDS if options.device == "cuda" else sys.maxsize))
    rounds: dict[str, list[dict[str, Any]]] = {}
    end = time.monotonic()
    for number in range(options.rounds):
        for row in in_turn(rows, number):
            end += row.seconds  # seconds that earlier rows have left are this row's, too
            left = min(end, limit) - time.monotonic()
            if left < SECONDS_LEAST:
                result = {"status": f"not run: {max(0, left):.0f} s were left"}
            else:
                try:
                    result = machine.run(row, min(end, limit) - 1, logs)
                except Failed as error:
                    result = {"status": f"failed: {error}"}
                    machine = Machine(options, row.ranks)
            rounds.setdefault(row.key, []).append(result)
            best = best_of(rounds[row.key])
            entry = found.entry(row)
            if "measured" in best or "measured" not in entry:
                entry.pop("status", None)
                entry.update(best)
            found.write()
            rate = result.get("measured", {}).get("tokens_per_second")
            print(f"{row.key}: {f'{rate:,.0f} tokens/s' if rate else result['status']}", file=sys.stderr, flush=True)
    machine.close()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", nargs="+", metavar="NAME", help=f"with a GPU: {', '.join(COMMANDS)}; or words that the names of rows have")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent.parent / "build" / "one_card", metavar="FOLDER")
    parser.add_argument("--python", default=sys.executable, help="has torch, transformers, ebb and the peers; default: this one")
    parser.add_argument("--plan", default=str(BUILT / "ebb-plan"), help="the command that starts ebb-plan")
    parser.add_argument("--machine", default="1xh200", help="with --predict: ebb-plan's, for the rows of a GPU; here: this one")
    parser.add_argument("--disk", default=None, help="a folder on the disk that is measured; default: the system's for temporary files")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of a row, at most")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--time", type=float, help=f"seconds for all rows; default on a GPU: {COMMAND_SECONDS}")
    parser.add_argument("--predict", action="store_true", help="only predict")
    options = parser.parse_args()
    begin = time.monotonic()
    wanted = options.rows or (["first"] if options.device == "cuda" else [])
    rows = [row for row in ROWS if row.device == options.device and all(word == row.command or word in row.key for word in wanted)]
    if not rows and not options.predict:
        parser.error(f"no row has {' and '.join(wanted)}; the rows: " + "; ".join(row.key for row in ROWS if row.device == options.device))
    found = Table(options.output)
    if options.predict or options.device == "cpu":
        predict(options, found)
    if not options.predict:
        measure(options, found, rows, begin)
    for row in ROWS:
        if "measured" not in found.entry(row):
            found.entry(row).setdefault("status", "not run: no GPU" if row.device == "cuda" and options.device == "cpu" else "not run")
    found.write()
    print(table(found.entries, found.machines))
    failed = [row for row in rows if "measured" not in found.entry(row) and "needs a GPU" not in found.entry(row)["status"]]
    return int(bool(failed) and not options.predict)


def predict(options: Any, found: Table) -> None:
    """Predicts the rows of the CPU, or with --predict all rows."""
    planners: dict[str, Planner] = {}
    for row in ROWS:
        if row.device == "cuda" and not options.predict:
            continue
        machine = "here" if row.device == "cpu" else options.machine
        if machine not in planners:
            planners[machine] = Planner(options.plan, machine, found.folder, options.disk or tempfile.gettempdir())
        said = planners[machine].of(row)
        if "tokens_per_second" in said:
            found.entry(row)["predicted"] = said
        elif said.get("why_not"):
            print(f"{row.key}: {said['why_not']}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
