#!/usr/bin/env python3
"""Ebb's gpt against PyTorch's FSDP2 on one GPU: tokens per second of GPT-2 sizes, in turns.

    bench/gpu_against_torch.py --output FOLDER [--gpt "COMMAND"] [--python PYTHON] [--time SECONDS] [--cases NAME...]
                               [--data FILE...] [--kernels JSON]

Both train the same shapes on the same text with the same batch and accumulation: bf16, stage 3, one rank, AdamW,
clipping at 1; FSDP2 with torch.compile (bench/peers/torch_gpt_cuda.py). The order changes from round to round. If a
step accumulates, both reduce once, and FSDP2's parameters stay gathered over its micro-batches.

FOLDER gets each run's log, gpu_against_torch.json (every run) and gpu_against_torch.md (the table). Both are written
after each run, so that an early end loses no figures. A run that fails or takes too long has a row that says so. If a
device's memory is too small for a batch, the case starts over with the next smaller batch. The most useful cases run
first, until --time is over. Exit status: 0 if every run of the cases has a figure.

A run's rate is that of all steps after its warm-up, between two points at which the host waits for the device. The
table has the median over the rounds. Utilisation: floating-point operations of the products, 6 (12 L W^2 + V W) +
6 L T W a token (L blocks of width W, V rows of the embedding, sequences of T; attention counted under the causal mask,
no recomputation), over the rate of an 8192^3 bf16 product, the higher of PyTorch's and Ebb's own (--kernels: the file
of bench/gpu_kernels_bench).

Transfers hidden: 1 - (time of a step with states in RAM - without) / (time of its copies, from the timeline of another
run), within 0 to 1. The whole difference counts as exposed transfer, including host updates that are not hidden.
"""

import argparse
import csv
import json
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time

import gpu_timeline
from gpu_cases import BOTH, CASES, GRAPHS, LARGEST, ON_CPU, TIMELINE, Case
from gpu_table import table

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PEER = HERE / "peers" / "torch_gpt_cuda.py"


class Failed(Exception):
    """The error that a row has instead of a figure."""


class Clock:
    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def left(self):
        return self.end - time.monotonic()


child = None


def stop_child():
    if child is not None and child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def stop(*_):
    stop_child()
    sys.exit(143)


def run(command, limit, log):
    """Returns its standard output. The log has all of its output."""
    global child
    with open(log, "w") as file:
        file.write(shlex.join(map(str, command)) + "\n")
        file.flush()
        try:
            child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=file, text=True,
                                     errors="replace", start_new_session=True)
        except OSError as error:
            raise Failed(f"cannot be started: {error}") from error
        try:
            output, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            stop_child()
            raise Failed(f"no end after {limit:.0f} s") from error
        file.write(output)
    text = log.read_text(errors="replace")
    if child.returncode != 0:
        lines = [line for line in text.splitlines()[1:] if line.strip()]
        raise Failed(f"exit status {child.returncode}: {lines[-1][:200] if lines else 'without output'}")
    return output


def memory_was_short(log):
    text = log.read_text(errors="replace").lower() if log.exists() else ""
    return any(words in text for words in ("out of memory", "outofmemoryerror", "the pools on the device need"))


def config_of_ebb(case, batch, offloaded):
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": case.accumulate(batch),
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.01}},
    }
    if case.accumulate(batch) > 1:
        config["ebb"] = {"reduce_at": "step"}  # as FSDP2 without synchronisation of each micro-batch
    if offloaded:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return config


class Bench:
    def __init__(self, args):
        self.args = args
        self.clock = Clock(args.time)
        self.rows, self.machine = [], {"matrix_tflops": {}, "failed": []}
        self.batches = {}  # the batch of each case
        self.output = pathlib.Path(args.output)
        self.output.mkdir(parents=True, exist_ok=True)
        self.runs = 0
        self.gpt_fails = None

    def log(self, what):
        self.runs += 1
        return self.output / f"torch_{self.runs:02}_{what}.log"

    def ebb(self, case, batch, program, limit, log):
        if self.gpt_fails:
            raise Failed(self.gpt_fails)
        offloaded, traced = "RAM" in program, "traced" in program
        stem = log.with_suffix("")
        config, losses, summary, trace = (stem.with_suffix(end) for end in
                                          (".config.json", ".csv", ".summary.json", ".trace.json"))
        config.write_text(json.dumps(config_of_ebb(case, batch, offloaded)))
        command = [*shlex.split(self.args.gpt), "--device", self.args.device, "--config", config, "--ranks", 1,
                   "--layers", case.layers, "--heads", case.heads, "--width", case.width, "--context", case.context,
                   "--vocabulary", case.vocabulary, "--steps", case.steps, "--sample", 0,
                   "--data", *self.args.data, "--losses", losses]
        if len(case.programs) > len(BOTH) or program in GRAPHS:
            command += ["--summary", summary]  # with the digest, which takes a while, to compare with other runs'
        if program in GRAPHS:
            # Measured products differ from run to run, and so would the bits.
            command += ["--cuda-graphs", "off" if "no CUDA" in program else "on", "--products", "default"]
        if traced:
            command += ["--trace", trace]
        output = run(command, limit, log)
        self.refuse_cpu(log)
        with open(losses) as file:
            rates = [float(row["tokens_per_second"]) for row in csv.DictReader(file)][case.warm_up():]
        # gpt waits for its device before the first of these steps and after the last one, so their sum is the time in between.
        result = {"tokens_per_second": statistics.harmonic_mean(rates), "timed_steps": len(rates),
                  "tokens_per_step": batch * case.accumulate(batch) * case.context}
        for key, tier in (("device_gib", "device"), ("host_gib", "cpu")):  # of the pools, by gpt's own table
            peak = re.search(rf"^all +{tier} +[0-9.]+ +([0-9.]+)$", output, re.MULTILINE)
            result[key] = float(peak[1]) / 1024 if peak else 0.0
        if summary.exists():
            said = json.loads(summary.read_text())
            result["digest"] = said["parameter_digest"]
            # Comparing launches with launches would show nothing.
            if program == GRAPHS[0] and self.args.device == "cuda" and not said["cuda_graphs"]["launches"]:
                raise Failed(f"no CUDA graph was launched: {said['cuda_graphs']['given_up'] or 'no pass came twice'}")
        if traced:
            try:
                result["timeline"] = gpu_timeline.figures(trace, case.warm_up())
                trace.unlink()  # tens of megabytes
            except (OSError, ValueError, LookupError) as error:
                result["timeline_failed"] = f"{type(error).__name__}: {error}"  # the rate holds without
        return result

    def refuse_cpu(self, log):
        if self.args.device == "cuda" and "training uses the CPU" in log.read_text(errors="replace"):
            raise Failed("gpt has found no GPU and used the CPU")

    def fsdp2(self, case, batch, program, limit, log):
        command = [self.args.python, PEER, "--device", self.args.device,
                   "--layers", case.layers, "--heads", case.heads, "--width", case.width, "--context", case.context,
                   "--vocabulary", case.vocabulary, "--batch", batch, "--accumulate", case.accumulate(batch),
                   "--steps", case.steps - case.warm_up(), "--warm-up", 2,
                   "--data", *self.args.data]
        if "Offload" in program:
            command += ["--offload"]
        if case.accumulate(batch) > 1:
            command += ["--keep-gathered"]
        if self.args.device == "cpu":
            command += ["--no-compile"]
        return json.loads(run(command, limit, log).splitlines()[-1])

    def attempt(self, name, case, batch, program, number):
        log = self.log(program.split(",")[0].lower() + ("_ram" if "RAM" in program or "Offload" in program else ""))
        row = {"case": name, "program": program, "round": number, "batch": batch,
               "accumulate": case.accumulate(batch), "log": log.name}
        begin = time.monotonic()
        try:
            if self.clock.left() < case.least:
                raise Failed(f"not run: {max(0, self.clock.left()):.0f} s are left")
            start = self.ebb if program.startswith("Ebb") else self.fsdp2
            row |= start(case, batch, program, min(case.limit, self.clock.left()), log)
        except Failed as failed:
            row["failed"] = str(failed)
        except Exception as error:  # a summary or a timeline that is not as expected loses its own row only
            row["failed"] = f"{type(error).__name__}: {error}"
        row["wall_seconds"] = time.monotonic() - begin
        print(f"{name}, round {number}, {program}, batch {batch}: "
              + (row.get("failed") or f"{row['tokens_per_second']:.0f} tokens/s")
              + f" ({row['wall_seconds']:.0f} s)", file=sys.stderr, flush=True)
        return row, "failed" in row and memory_was_short(log)

    def case(self, name, case):
        """Runs a case with the largest batch that fits every program. A timeline has the batch of its case."""
        most = self.batches.get(name.removesuffix(TIMELINE), case.batches[0])
        for batch in (batch for batch in case.batches if batch <= most):
            rows, short, broken = [], False, set()
            for number in range(1, case.rounds + 1):
                turn = (number - 1) % len(case.programs)
                for program in case.programs[turn:] + case.programs[:turn]:
                    if program in broken:
                        continue
                    row, short = self.attempt(name, case, batch, program, number)
                    rows.append(row)
                    self.write(rows)
                    if "failed" in row:
                        broken.add(program)
                    if short and batch != case.batches[-1]:
                        break
                    short = False
                if short:
                    break
            self.rows += [row | {"superseded": True} for row in rows] if short else rows
            if not short:
                self.batches[name] = batch
                return

    def add_rate(self, whose, measure):
        try:
            said = measure()
            self.machine["matrix_tflops"][whose] = said["matrix_tflops"]
            self.machine |= {key: said[key] for key in ("device", "torch", "matrix_size") if key in said}
        except (Failed, OSError, ValueError, LookupError) as error:
            self.machine["failed"].append(f"no rate by {whose}: {error}")

    def start(self):
        """The machine's rate, and whether gpt finds the GPU."""
        size = 8192 if self.args.device == "cuda" else 256
        command = [self.args.python, PEER, "--matrix-rate", "--matrix-size", size, "--device", self.args.device]
        if self.args.kernels:
            self.add_rate("Ebb", lambda: json.loads(pathlib.Path(self.args.kernels).read_text()))
        self.add_rate("PyTorch", lambda: json.loads(run(command, min(90, self.clock.left()), self.log("matrix"))
                                                    .splitlines()[-1]))
        probe = Case(1, 1, 64, (1,), (), context=64, vocabulary=256, steps=1)
        try:
            self.ebb(probe, 1, "Ebb", min(60, self.clock.left()), self.log("probe"))
        except Exception as error:
            self.gpt_fails = f"gpt's smallest run failed: {error}"
            print(self.gpt_fails, file=sys.stderr)

    def write(self, unfinished=()):
        rows = self.rows + list(unfinished)
        written = {"machine": self.machine, "rows": rows, "arguments": vars(self.args)}
        (self.output / "gpu_against_torch.json").write_text(json.dumps(written, indent=1, default=str) + "\n")
        (self.output / "gpu_against_torch.md").write_text(table(rows, self.machine))


def main():
    text = [ROOT / "ARCHITECTURE.md"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--gpt", default=str(ROOT / "build/release/bin/gpt"), help="the command that starts it")
    parser.add_argument("--python", default=sys.executable, help="a Python with torch")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny cases, to try this")
    parser.add_argument("--time", type=float, default=500, help="seconds for all")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *ON_CPU], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--largest", action="store_true", help="the cases that fill 128 GiB of RAM, and no others")
    parser.add_argument("--data", nargs="+", type=pathlib.Path, default=text, help="files to train on")
    parser.add_argument("--kernels", metavar="JSON", help="the rate of Ebb's products; the file may be missing")
    args = parser.parse_args()
    for path in args.data:
        if not path.is_file():
            parser.error(f"--data {path}: there is no such file")
    usual = [name for name in (CASES if args.device == "cuda" else ON_CPU) if name not in LARGEST]
    names = args.cases or (LARGEST if args.largest and args.device == "cuda" else usual)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    bench = Bench(args)
    bench.start()
    for name in names:
        bench.case(name, (CASES | ON_CPU)[name])
        bench.write()
    print(table(bench.rows, bench.machine))
    counted = [row for row in bench.rows if not row.get("superseded")]
    failed = sum("failed" in row for row in counted)
    print(f"{len(counted)} runs, of which {failed} have no figure")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
