"""The rows of bench/one_card/run.py as a table, as CSV and as a picture."""

from __future__ import annotations

import csv
import html
import pathlib
import statistics
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from cases import BASE, DEVICE_MEMORY, GIB, HOST_MEMORY, ROWS, SHAPES, Row, tokens_text
from gpu_table import cell, head, line

MOVES = ("pcie_up", "pcie_down", "disk_read", "disk_written")
TIERS = ("device", "RAM", "disk")


def figures_of(row: Row, entry: dict[str, Any], entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One row of the CSV: numbers, or None where there is none."""
    measured, predicted = entry.get("measured") or {}, entry.get("predicted") or {}
    rate = measured.get("tokens_per_second")
    base = (entries.get(f"{row.shape_name}, {tokens_text(row.tokens)}, {BASE}", {}).get("measured") or {}).get("tokens_per_second")
    parameters = row.shape.parameters()
    figures: dict[str, Any] = {
        "command": row.command, "model": row.shape_name, "parameters": parameters, "tokens": row.tokens, "system": row.system_name,
        "ranks": row.ranks, "tokens_per_second": rate, "share": rate / base if rate and base else None,
        "predicted_tokens_per_second": predicted.get("tokens_per_second"), "waits_for": predicted.get("waits_for"),
    }
    for tier in TIERS:
        figures[f"{tier}_bytes_per_parameter"] = held / parameters if (held := measured.get(f"{tier}_held")) is not None else None
    for tier, pools in zip(TIERS, ("device_pools", "cpu_pools", "nvme_pools")):
        figures[f"predicted_{tier}_bytes_per_parameter"] = predicted[pools] / parameters if pools in predicted else None
    for peak in ("device_peak", "RAM_peak"):
        figures[f"{peak}_gib"] = value / GIB if (value := measured.get(peak)) is not None else None
    for move in MOVES:
        figures[f"{move}_gb"] = value / 1e9 if (value := measured.get(move)) is not None else None
        # The engine's own plan knows copies on a CPU, too, where they are no transfers to another device.
        planned = measured.get(f"{move}_planned", predicted.get(move))
        figures[f"predicted_{move}_gb"] = planned / 1e9 if planned is not None else None
    steps = len(measured.get("seconds", ()))
    figures["steps"] = steps
    figures["loss"] = measured["losses"][-1] if measured.get("losses") else None
    figures["row"] = f"measured, {steps} {'step' if steps == 1 else 'steps'}" if rate else entry.get("status", "not run")
    return figures


def beside(measured: float | None, predicted: float | None, form: str) -> str:
    """Measured (predicted)."""
    if measured is None and predicted is None:
        return ""
    return (cell(measured, form) or "-") + (f" ({form.format(predicted)})" if predicted is not None else "")


def row_of(figures: dict[str, Any]) -> str:
    rate, predicted = figures["tokens_per_second"], figures["predicted_tokens_per_second"]
    tiers = " / ".join(
        beside(figures[f"{tier}_bytes_per_parameter"], figures[f"predicted_{tier}_bytes_per_parameter"], "{:.1f}") or "-" for tier in TIERS)
    peaks = " / ".join(cell(figures[f"{peak}_gib"], "{:.2f}") or "-" for peak in ("device_peak", "RAM_peak"))
    form = "{:.0f}" if max(figures[f"predicted_{move}_gb"] or figures[f"{move}_gb"] or 0 for move in MOVES) >= 100 else "{:.3g}"
    moves = [" / ".join(beside(figures[f"{move}_gb"], figures[f"predicted_{move}_gb"], form) or "-" for move in pair) for pair in (MOVES[:2], MOVES[2:])]
    return line(
        figures["model"], tokens_text(figures["tokens"]), figures["system"], cell(rate, "{:,.0f}"), cell(figures["share"], "{:.1%}"),
        cell(predicted, "{:,.0f}"), cell(rate / predicted if rate and predicted else None, "{:.2f}"),
        tiers if tiers != "- / - / -" else "", peaks if peaks != "- / -" else "", *(words if words != "- / -" else "" for words in moves),
        figures["row"])


def table(entries: dict[str, dict[str, Any]], machines: dict[str, str]) -> str:
    lines = ["Bytes: measured (predicted), of all ranks. Bytes a parameter are held on device / in RAM / on disk."]
    sizes = ", ".join(f"{name} {16 * shape.parameters() / DEVICE_MEMORY:.1f}" for name, shape in SHAPES.items() if name != "tiny")
    for device, title in (("cpu", "On a CPU, 2 ranks, tiny shapes"), ("cuda", "On one GPU")):
        lines += ["", f"## {title}", "", machines.get(device, "not run")]
        if device == "cuda":
            lines += [f"Caps: {DEVICE_MEMORY / GIB:g} GiB of the device (without offload: none), {HOST_MEMORY / GIB:g} GiB of RAM. "
                      f"16 bytes a parameter are so many times the device's: {sizes}."]
        lines += head("model", "a step", "system", "tokens/s", "of Ebb without offload", "ebb-plan's tokens/s", "measured / predicted",
                      "bytes a parameter", "peak GiB, device / RAM", "PCIe up / down, GB a step", "disk read / written, GB a step", "row")
        lines += [row_of(figures_of(row, entries.get(row.key, {}), entries)) for row in ROWS if row.device == device]
    return "\n".join(lines) + "\n"


def write_csv(path: pathlib.Path, entries: dict[str, dict[str, Any]]) -> None:
    rows = [figures_of(row, entries.get(row.key, {}), entries) for row in ROWS]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def picture(entries: dict[str, dict[str, Any]]) -> str:
    """Tokens a second, a bar a row, in a scale of each model and batch. A line across marks ebb-plan's prediction."""
    left, wide, high, gap = 330, 420, 16, 30
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in ROWS:
        groups.setdefault((row.shape_name, row.tokens), []).append(figures_of(row, entries.get(row.key, {}), entries))
    shapes, y = [], 34
    for (shape, tokens), rows in groups.items():
        most = max((value for figures in rows for value in (figures["tokens_per_second"], figures["predicted_tokens_per_second"]) if value), default=1.0)
        shapes.append(f'<text x="8" y="{y}" font-weight="bold">{shape}, {tokens_text(tokens)} a step</text>')
        for figures in rows:
            y += high + 4
            rate, predicted = figures["tokens_per_second"], figures["predicted_tokens_per_second"]
            shapes.append(f'<text x="{left - 8}" y="{y}" text-anchor="end">{html.escape(figures["system"])}</text>')
            if rate:
                colour = "#2a6f97" if figures["system"].startswith("Ebb") else "#a5a5a5"
                shapes.append(f'<rect x="{left}" y="{y - 12}" width="{wide * rate / most:.1f}" height="{high}" fill="{colour}"/>')
            if predicted:
                at = left + wide * predicted / most
                shapes.append(f'<line x1="{at:.1f}" y1="{y - 14}" x2="{at:.1f}" y2="{y + 6}" stroke="#c1121f" stroke-width="2"/>')
            end = left + wide * max(rate or 0, predicted or 0) / most + 8
            words = f"{rate:,.0f} tokens/s" if rate else figures["row"]
            shapes.append(f'<text x="{end:.1f}" y="{y}" fill="{"#000" if rate else "#777"}">{html.escape(words[:70])}</text>')
        y += gap
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 480}" height="{y}" font-family="sans-serif" font-size="12">\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n<text x="8" y="16">Bars: measured. Red lines: ebb-plan\'s prediction.</text>\n'
            + "\n".join(shapes) + "\n</svg>\n")


def measured_of(row: Row, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the table needs of the ranks' results: rank 0's times, and sums of bytes."""
    def total(key: str) -> int:
        return sum(rank.get(key, 0) for rank in ranks)

    seconds = ranks[0]["seconds"]
    ours = "cpu_pools" in ranks[0]
    found: dict[str, Any] = {
        "seconds": seconds, "losses": ranks[0]["losses"], "made_seconds": ranks[0]["made_seconds"],
        "tokens_per_second": row.tokens / statistics.median(seconds),
        "device_held": total("torch_device") + total("device_pools"), "device_peak": total("torch_device_peak") + total("device_pools"),
        "RAM_held": total("cpu_pools") if ours else total("ram"), "RAM_peak": total("ram_peak"),
        "disk_held": total("nvme_pools") if ours else ranks[0]["files"],
        # The system's count of every system, of which a median step is taken.
        **{name: int(sum(statistics.median(step[at] for step in rank["disk"]) for rank in ranks)) for at, name in enumerate(("disk_read", "disk_written"))},
    }
    if ours:
        found |= {name: total(name) for name in MOVES[:2]}
        found |= {f"{name}_planned": total(f"{name}_planned") for name in MOVES}
    return found
