"""The rows of bench/gpu_against_torch.py as tables: rates, ratios, and timelines."""

import statistics

from gpu_cases import CASES, OFFLOADED, ON_CPU, RATIOS, TIMELINE

TIMES = ("step", "issue", "wait", "ahead", "verdict", "start", "host_percent", "upload", "download", "host_sum",
         "host_update")


def cell(value, form="{:.0f}"):
    return "" if value is None else form.format(value)


def rates_of(rows):
    """Tokens per second of each program of each case: the median over its rounds."""
    found = {}
    for row in rows:
        if "tokens_per_second" in row and "failed" not in row and not row.get("superseded"):
            found.setdefault((row["case"], row["program"]), []).append(row["tokens_per_second"])
    return {key: statistics.median(values) for key, values in found.items()}


def line(*cells):
    return "| " + " | ".join(str(cell).replace("\n", " ").replace("|", "/") for cell in cells) + " |"


def head(*cells):
    return ["", line(*cells), "|" + "---|" * len(cells)]


def row_of(case, program, runs, rate, peak):
    """A row for all runs of a program in a case. Runs with a batch that was too large have only their error."""
    good = [run for run in runs if "failed" not in run and not run.get("superseded")]
    failures = [("batch of {batch}: " if run.get("superseded") else "").format(**run) + run["failed"]
                for run in runs if "failed" in run]
    last = (good or runs)[-1]
    flops = (CASES | ON_CPU)[case].flops_of_token()
    memory = ", ".join(cell(last.get(key), "{:.1f}") or "?" for key in ("device_gib", "host_gib")) if good else ""
    return line(case, program, f"{last['batch']} x {last['accumulate']}", cell(rate),
                cell(1e3 * last["tokens_per_step"] / rate if rate else None, "{:.1f}"),
                cell(rate * flops / peak / 1e12 if rate and peak else None, "{:.1%}"), memory,
                "; ".join([str(len(good))] * bool(good) + failures))


def table(rows, machine):
    rates, peak = rates_of(rows), max(machine["matrix_tflops"].values(), default=None)
    lines = [f"{machine.get('device', '?')}, PyTorch {machine.get('torch', 'not measured')}; TFLOP/s of a bf16 product "
             f"of {machine.get('matrix_size', '?')}^3: "
             + (", ".join(f"{rate:.3g} by {whose}" for whose, rate in machine["matrix_tflops"].items()) or "no rate")
             + "".join(f"; {failed}" for failed in machine["failed"])]
    lines += head("case", "program", "batch x micro-batches", "tokens/s", "ms a step", "utilisation",
                  "GiB device, host", "runs")
    for case, program in dict.fromkeys((row["case"], row["program"]) for row in rows):
        runs = [row for row in rows if (row["case"], row["program"]) == (case, program)]
        lines.append(row_of(case, program, runs, rates.get((case, program)), peak))

    lines += head("case", "ratio", "is", "wanted")
    for case in dict.fromkeys(row["case"] for row in rows):
        for ours, theirs, least in RATIOS.get(case, ()):
            a, b = rates.get((case, ours)), rates.get((case, theirs))
            lines.append(line(case, f"{ours} / {theirs}", cell(a / b if a and b else None, "{:.3f}"), least or ""))
        hidden = hidden_of(rows, case)
        if hidden is not None:
            lines.append(line(case, "transfers hidden", f"{hidden:.1%}", ""))
        digests = [row["digest"] for row in rows if row["case"] == case and row.get("digest")]
        if len(digests) > 1:
            lines.append(line(case, "Ebb's parameters alike", "yes" if len(set(digests)) == 1 else "NO", "yes"))

    times = [(row["case"], row["program"], row["timeline"]) for row in rows if row.get("timeline")]
    if times:
        lines += ["", "Timelines, in ms; bench/gpu_timeline.py explains the columns"]
        lines += head("case", "program", *TIMES)
        lines += [line(case, program, *(cell(figures.get(key), "{:.3f}") for key in TIMES))
                  for case, program, figures in times]
    return "\n".join(lines) + "\n"


def hidden_of(rows, case):
    rates = rates_of(rows)
    inside, outside = rates.get((case, OFFLOADED[0])), rates.get((case, "Ebb"))
    traced = [row for row in rows if row["case"] == case + TIMELINE and row.get("timeline")]
    if not (inside and outside and traced):
        return None
    copies = sum(traced[-1]["timeline"].get(key) or 0 for key in ("upload", "download")) / 1e3
    tokens = traced[-1]["tokens_per_step"]
    return min(1.0, max(0.0, 1 - (tokens / inside - tokens / outside) / copies)) if copies else None
