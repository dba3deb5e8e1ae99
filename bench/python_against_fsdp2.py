#!/usr/bin/env python3
"""A transformers model that trains through ebb, beside FSDP2, DeepSpeed and plain torch on this machine's CPU, in turns.

    bench/python_against_fsdp2.py [--compare WHAT] [--model gpt2|llama] [--rounds 8] [--steps 4] [--compile]
                                  [--folder FOLDER] [--output FILE.csv]

gpt2 and llama: 6 layers, width 384, context 256, batch 4 of a rank, fp32, AdamW without clipping, 2 ranks of one thread each.
fsdp2      each block a unit of FSDP2's, gloo, torch's fused AdamW; and torch, each rank by itself, for the time of compute alone
world1     one rank of two threads beside torch with its fused AdamW
deepspeed_cpu, deepspeed_nvme: ZeRO-3 with parameters and states in RAM, or on the disk; one JSON for both libraries
nvme       ebb with parameters and states on the disk beside ebb with both on the device
gpu        one rank on a GPU: ebb with states there and in RAM, FSDP2 and plain torch, GPT-2's 124 M parameters in bf16, batch 16 x 1024
memory, memory_nvme: a GPT-2 of 12 x 1536 over 16 tokens, with very small activations; ebb with everything on the device, or with
           parameters, gradients and states on the disk. It gathers no unit ahead ("prefetch_depth": 0)
scopes     microseconds that hooks and calls add to a scope of 12 parameters
All processes stay alive. A round is some steps of each, in an order that changes, so that other load disturbs all alike. The table
has the medians of all rounds' steps, and the median of the rounds' ratios. Peaks are those of the larger rank in these steps, above a
process that has all libraries and has run the plain model once. Held memory is counted after the steps; the engine's table predicts it. Needs torch and
transformers, for DeepSpeed also ninja and libaio-dev. ebb has keep_memory=True, except in comparisons of memory. Figures need a
machine without other load."""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile

from turns import HERE, Peer, environments_of, in_turn, parser_of, print_head, print_row

TOKENS = {"gpu": 16 * 1024}  # of a rank's batch; others: 4 * 256
# Systems; ranks; comparisons: ours, the other, the measure, the bar.
COMPARISONS = {
    "fsdp2": (["fsdp2", "ebb", "torch"], 2, [("ebb", "fsdp2", "speed", 1.3), ("ebb", "torch", "speed", None)]),
    "world1": (["torch", "ebb"], 1, [("ebb", "torch", "time", 1.02)]),
    "deepspeed_cpu": (["deepspeed_cpu", "ebb_cpu"], 2, [("ebb_cpu", "deepspeed_cpu", "speed", 1.3)]),
    "deepspeed_nvme": (["deepspeed_nvme", "ebb_nvme"], 2, [("ebb_nvme", "deepspeed_nvme", "speed", 1.3)]),
    "nvme": (["ebb", "ebb_nvme"], 2, [("ebb_nvme", "ebb", "speed", 0.95)]),
    "gpu": (["torch", "fsdp2", "ebb", "ebb_cpu"], 1, [("ebb", "fsdp2", "speed", None), ("ebb", "torch", "speed", None), ("ebb", "fsdp2", "peak", None)]),
    "memory": (["fsdp2", "ebb"], 2, [("ebb", "fsdp2", "peak", 0.6), ("ebb", "its table", "held", 1.02)]),
    "memory_nvme": (["fsdp2", "ebb_nvme_all"], 2, [("ebb_nvme_all", "fsdp2", "peak", 0.6), ("ebb_nvme_all", "its table", "held", 1.02)]),
}


class System:
    """The processes of one system. They stay alive."""

    def __init__(self, name, model, ranks, folder, *options):
        self.name = name
        place = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // ranks)), "DS_ACCELERATOR": "cpu", "EBB_LOG_LEVEL": "warn"}
        if model == "memory":
            place["MALLOC_MMAP_THRESHOLD_"] = "65536"  # freed memory goes back at once, so that the system counts only held memory
            model = "states"
        command = [sys.executable, HERE / "peers/module_training.py", name, model, folder, *options]
        self.ranks = [Peer(command, **place, **rank) for rank in environments_of(ranks)]
        for rank in self.ranks:
            self._answer(rank, "READY")

    def run(self, steps):
        """Rank 0's figures, with the peaks of the larger rank."""
        for rank in self.ranks:
            rank.tell(steps)
        results = [json.loads(self._answer(rank, "RESULT")) for rank in self.ranks]
        largest = max(results, key=lambda result: result["peak"])
        return results[0] | {key: largest[key] for key in ("peak", "held", "table")}

    def close(self):
        for rank in self.ranks:
            rank.process.stdin.close()  # all of them, because ranks end together
        for rank in self.ranks:
            rank.close()

    def _answer(self, rank, word):
        return rank.answer(lambda line: line.startswith(word)).removeprefix(word)


def median_of(rows, system, key):
    return statistics.median(row[key] for row in rows if row["system"] == system)


def ratio_of(rows, ours, other, key):
    """The median of ours over the other's, round by round."""
    by_round = {}
    for row in rows:
        by_round.setdefault(row["round"], {})[row["system"]] = row[key]
    return statistics.median(both[ours] / both[other] for both in by_round.values())


def compare(what, model, rounds, steps, folder, *options):
    names, ranks, pairs = COMPARISONS[what]
    counts_memory = what.startswith("memory")
    model = "memory" if counts_memory else "gpu" if what == "gpu" else model
    systems = [System(name, model, ranks, folder, *options) for name in names]
    for system in systems:
        system.run(3)  # the first steps allocate
    rows = []
    for number in range(rounds):
        for system in in_turn(systems, number):
            result = system.run(steps)
            rows.append({
                "compared": what, "model": model, "round": number, "system": system.name, "ranks": ranks,
                "ms": 1e3 * statistics.median(result["seconds"]), "core_ms": 1e3 * statistics.median(result["cores"]),
                **{f"{key}_mib": result[key] / 2**20 for key in ("peak", "held", "table")}, "loss": result["loss"],
            })
            print(f"round {number}, {system.name}: {rows[-1]['ms']:.1f} ms a step, loss {result['loss']:.5f}", file=sys.stderr, flush=True)
    for system in systems:
        system.close()
    print(f"{what}, {model}, {ranks} ranks, {rounds} rounds of {steps} steps")
    print_head("system", "ms a step", "ms of cores, a rank", "tokens/s", "peak, MiB", "held, MiB", "engine's table, MiB")
    for name in names:
        ms, cores, peak, held, table = (median_of(rows, name, key) for key in ("ms", "core_ms", "peak_mib", "held_mib", "table_mib"))
        tokens = "" if counts_memory else f"{ranks * TOKENS.get(what, 4 * 256) / ms * 1e3:.0f}"
        print_row(name, f"{ms:.1f}", f"{cores:.1f}", tokens, f"{peak:.0f}", f"{held:.0f}", f"{table:.1f}" if table else "")
    for ours, other, measure, bar in pairs:
        if other == "its table":
            ratio = median_of(rows, ours, "held_mib") / median_of(rows, ours, "table_mib")
        elif measure == "speed":
            ratio = ratio_of(rows, other, ours, "ms")
        else:
            ratio = ratio_of(rows, ours, other, "ms" if measure == "time" else "peak_mib")
        wanted = f" (bar: {'at least' if measure == 'speed' else 'at most'} {bar})" if bar else ""
        print(f"{ours} over {other}, {measure}: {ratio:.3f}{wanted}")
    print(flush=True)
    return rows


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--compare", choices=[*COMPARISONS, "scopes"], default="fsdp2")
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="torch compiles the blocks of all systems but DeepSpeed")
    parser.add_argument("--folder", default=None, help="on the disk that is measured; default: the system's for temporary files")
    parser.add_argument("--output", default=None, help="one row for each round and system")
    options = parser.parse_args()
    if options.compare == "scopes":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "EBB_LOG_LEVEL": "warn"}
        return subprocess.run([sys.executable, HERE / "peers/module_scopes.py"], env=environment, check=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = compare(options.compare, options.model, options.rounds, options.steps, folder, *(["compile"] if options.compile else []))
    if options.output:
        with open(options.output, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
