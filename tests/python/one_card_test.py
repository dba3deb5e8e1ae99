"""bench/one_card: its rows, its table, and its path on a CPU in a small form."""

import csv
import json
import os
import subprocess
import sys
import time
import xml.dom.minidom
from pathlib import Path

import pytest

import ebb

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH / "one_card"), str(BENCH)]

import cases
import report
from cases import BASE, COMMAND_SECONDS, COMMANDS, DEVICE_MEMORY, HOST_MEMORY, ROWS, SHAPES, settings_of
from turns import BUILT, Peer

ON_GPU = [row for row in ROWS if row.device == "cuda"]


def config_of(shape):
    return {"model": shape.config()}


def meta_model(shape):
    import torch
    from systems import make_model

    with torch.device("meta"):
        return make_model(config_of(shape))


def test_commands_end_in_their_time_and_the_first_has_nine_rows():
    for command in COMMANDS:
        assert sum(row.seconds for row in ROWS if row.command == command) < COMMAND_SECONDS
    first = [row for row in ROWS if row.command == "first"]
    assert len(first) == 9
    assert {row.shape_name for row in first} == {"1.5B", "3B"} and {row.tokens for row in first} == {cases.K128}
    assert {(row.system.program, row.system.place) for row in first} == {
        ("ebb", "device"), ("ebb", "states"), ("ebb", "ram"), ("ebb", "nvme"), ("fsdp2", "ram"), ("deepspeed", "ram")}
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_a_step_has_its_tokens():
    for row in ROWS:
        assert row.ranks * row.micro_batches * row.micro_batch * row.shape.context == row.tokens
    assert {row.shape.context for row in ON_GPU} == {4096}
    assert {row.tokens for row in ON_GPU} == {2**14, 2**17, 2**19}


def test_every_share_has_its_base():
    with_base = {(row.shape_name, row.tokens) for row in ROWS if row.system_name == BASE}
    assert {(row.shape_name, row.tokens) for row in ON_GPU if row.tokens == cases.HALF_MILLION} <= with_base


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_transformers(name):
    assert SHAPES[name].parameters() == sum(parameter.numel() for parameter in meta_model(SHAPES[name]).parameters())


@pytest.mark.parametrize("row", [row for row in ON_GPU if row.system.program == "ebb"], ids=lambda row: row.key)
def test_rows_of_ebb_keep_the_caps_in_the_plan(row, tmp_path):
    rows = ebb.predict_memory(meta_model(row.shape), settings_of(row, str(tmp_path)), row.ranks)
    held = {tier: sum(one.predicted for one in rows if one.tier == tier) for tier in ("device", "cpu", "nvme")}
    assert held["cpu"] < HOST_MEMORY
    assert not row.capped or held["device"] < DEVICE_MEMORY / 2  # the rest is torch's
    assert (held["nvme"] > 0) == (row.system.place == "nvme")
    assert (held["cpu"] > 0) == row.capped
    bytes_of_states = 16 if not row.system.small else 6
    assert sum(held.values()) >= (bytes_of_states - 2 * (row.system.place == "nvme")) * row.shape.parameters()


def entries_of(row, rate, **more):
    measured = {
        "seconds": [row.tokens / rate], "losses": [7.5], "tokens_per_second": rate, "device_held": 3 * row.shape.parameters(), "device_peak": 2**30,
        "RAM_held": 0, "RAM_peak": 2**31, "disk_held": 0, "disk_read": 0, "disk_written": 0}
    return {row.key: {"measured": measured | more, "predicted": {"tokens_per_second": 2 * rate, "waits_for": "device"}}}


def found(command, shape, tokens, system):
    return next(row for row in ROWS if (row.command, row.shape_name, row.tokens, row.system_name) == (command, shape, tokens, system))


def test_the_table_has_shares_predictions_and_what_has_not_run(tmp_path):
    base, states = (found("first", "1.5B", cases.K128, name) for name in (BASE, "Ebb, states in RAM"))
    peer = found("first", "1.5B", cases.K128, "FSDP2, CPUOffloadPolicy")
    entries = entries_of(base, 40000.0) | entries_of(states, 39000.0, pcie_up=3 * 10**9, pcie_up_planned=4 * 10**9)
    entries[peer.key] = {"status": "failed: took more than 112 GiB of RAM"}
    text = report.table(entries, {"cuda": "a card"})
    lines = {line for line in text.splitlines() if line.startswith("|")}
    of_states = next(line for line in lines if "1.5B | 128k tokens | Ebb, states in RAM" in line)
    for cell in ("| 39,000 |", "| 97.5% |", "| 78,000 |", "| 0.50 |", "3.0 / 0.0 / 0.0", "3 (4) / -", "measured, 1 step"):
        assert cell in of_states, cell
    assert "failed: took more than 112 GiB of RAM" in next(line for line in lines if "1.5B | 128k tokens | FSDP2" in line)
    assert sum("| not run |" in line for line in lines) == len(ROWS) - 3

    report.write_csv(tmp_path / "table.csv", entries)
    with open(tmp_path / "table.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert [(one["model"], int(one["tokens"]), one["system"]) for one in written] == [(row.shape_name, row.tokens, row.system_name) for row in ROWS]
    assert float(next(one for one in written if one["share"] not in ("", "1.0"))["share"]) == pytest.approx(0.975)
    drawn = xml.dom.minidom.parseString(report.picture(entries))
    assert len(drawn.getElementsByTagName("rect")) == 1 + 2 and len(drawn.getElementsByTagName("line")) == 2


@pytest.fixture(scope="module")
def environment():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in names}


def test_a_job_ends_with_its_time_or_its_ram_and_keeps_its_steps(tmp_path):
    rank = Peer([sys.executable, BENCH / "one_card" / "rank.py"])
    rank.answer(lambda line: line.startswith("READY"))
    job = {"device": "cpu", "result": str(tmp_path / "result"), "log": str(tmp_path / "log"), "host_memory": 2**40, "deadline": time.monotonic() - 1,
           "environment": {}, "threads": 1, "program": "nobody"}

    def finished(**more):
        rank.tell(json.dumps(job | more))
        return json.loads(rank.answer(lambda line: line.startswith("RESULT")).removeprefix("RESULT"))

    assert finished()["failed"] == "its time was over"
    Path(job["result"]).write_text(json.dumps({"seconds": [1.5]}))
    ended = finished()
    assert ended["seconds"] == [1.5] and "failed" not in ended
    Path(job["result"]).unlink()
    assert finished(host_memory=-1, deadline=time.monotonic() + 600)["failed"].startswith("took more than")
    assert finished(deadline=time.monotonic() + 600)["failed"].startswith("exit status 1: KeyError: 'nobody'")
    rank.close()


def run(environment, folder, *words):
    command = [sys.executable, str(BENCH / "one_card" / "run.py"), "--output", str(folder), "--plan", "false", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_path_on_a_cpu_measures_what_was_planned(tmp_path, environment):
    done = run(environment, tmp_path, "--device", "cpu", "--rows", "everything on NVMe", "--steps", "1", "--disk", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    with open(tmp_path / "one_card.csv", newline="") as file:
        rows = {(row["command"], row["system"]): row for row in csv.DictReader(file)}
    ours = rows["cpu", "Ebb, everything on NVMe"]
    assert float(ours["tokens_per_second"]) > 0 and ours["row"] == "measured, 1 step"
    for move in ("pcie_up", "pcie_down", "disk_read", "disk_written"):
        assert float(ours[f"predicted_{move}_gb"]) > 0
        # The engine's count is that of its last step. The system's has what was in flight when the step began or ended.
        if move.startswith("pcie") or not on_tmpfs(tmp_path):
            room = 1e-9 if move.startswith("pcie") else 0.4
            assert float(ours[f"{move}_gb"]) == pytest.approx(float(ours[f"predicted_{move}_gb"]), rel=room)
    assert float(ours["disk_bytes_per_parameter"]) == pytest.approx(14, rel=0.02)
    others = [row for key, row in rows.items() if key != ("cpu", "Ebb, everything on NVMe")]
    assert {row["row"] for row in others if row["command"] == "cpu"} == {"not run"}
    assert {row["row"] for row in others if row["command"] != "cpu"} == {"not run: no GPU"}
    assert not any(row["tokens_per_second"] for row in others)

    # A later command keeps the row. On this machine a GPU's rows say that there is none.
    import torch

    if not torch.cuda.is_available():
        after = run(environment, tmp_path, "--device", "cuda", "--rows", "first")
        assert after.returncode == 1
        table = (tmp_path / "one_card.md").read_text()
        assert f"| {float(ours['tokens_per_second']):,.0f} |" in table and table.count("not run: no GPU") == len(ON_GPU)


def on_tmpfs(folder):
    return subprocess.run(["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True).stdout.strip() == "tmpfs"


@pytest.mark.skipif(not (BUILT / "ebb-plan").exists(), reason="ebb-plan is not built")
def test_predictions_are_of_ebb_plan(tmp_path):
    from predict import Planner

    planner = Planner(str(BUILT / "ebb-plan"), "1xh200", tmp_path, str(tmp_path))
    row = found("first", "1.5B", cases.K128, "Ebb, everything in RAM")
    said = planner.of(row)
    assert said["fits"] and said["tokens_per_second"] > 0
    assert said["cpu_pools"] / row.shape.parameters() == pytest.approx(18, rel=0.02)  # bf16, masters, two states, gradients
    assert said["pcie_up"] > said["pcie_down"] > 0 == said["disk_read"]
    assert planner.of(found("first", "1.5B", cases.K128, "DeepSpeed, ZeRO-3 offload")) == {}
