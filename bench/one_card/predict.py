"""ebb-plan's prediction of a row: it needs no device, no disk and no torch."""

from __future__ import annotations

import json
import pathlib
import shlex
import subprocess
import tempfile
from typing import Any

from cases import Row, settings_of

MOVED = {"pcie_up": "copies to the device", "pcie_down": "copies to the host", "disk_read": "disk reads", "disk_written": "disk writes"}


class Planner:
    """Asks one ebb-plan about all rows. `machine`: a name, a file, or "here", which is measured once."""

    def __init__(self, command: str, machine: str, folder: pathlib.Path, disk: str):
        self.command, self.folder, self.disk, self.machine = shlex.split(command), folder, disk, machine
        self.why_not = ""
        if machine == "here":
            measured = folder / "machine.json"
            try:
                measured.write_text(self._said("--machine", "here", "--nvme-path", disk, "--show-machine"))
            except (OSError, subprocess.SubprocessError) as error:
                self.why_not = f"no prediction: {error}"
            self.machine = str(measured)

    def of(self, row: Row) -> dict[str, Any]:
        """Tokens a second and bytes of all ranks; or {"why_not": ...}."""
        if self.why_not or row.system.program != "ebb":
            return {"why_not": self.why_not} if self.why_not else {}
        with tempfile.TemporaryDirectory() as folder:
            shape, settings = pathlib.Path(folder, "config.json"), pathlib.Path(folder, "settings.json")
            shape.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **row.shape.config()}))
            settings.write_text(json.dumps(settings_of(row, self.disk)))
            try:
                said = json.loads(self._said(
                    "--config-json", str(shape), "--config", str(settings), "--machine", self.machine, "--ranks", str(row.ranks), "--context",
                    str(row.shape.context), "--activations", "torch", "--recompute", "--json",
                ))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                return {"why_not": f"no prediction: {error}"}
        chosen = said["chosen"]
        if "tokens_per_second" not in chosen:
            return {"why_not": f"no prediction: {chosen.get('refused', 'it does not fit')}"}
        moved = {name: row.ranks * chosen["moved_bytes"][theirs] for name, theirs in MOVED.items()}
        pools = {f"{tier}_pools": row.ranks * (chosen["bytes"][tier] - chosen["classes"].get(tier, {}).get("workspace", 0)) for tier in ("device", "cpu", "nvme")}
        resources = chosen["critical"]["resources"]
        return {
            "tokens_per_second": chosen["tokens_per_second"], "machine": said["machine"]["name"], "waits_for": max(resources, key=resources.get),
            "device_bytes": chosen["bytes"]["device"], "fits": chosen["fits"], **moved, **pools,
        }

    def _said(self, *arguments: str) -> str:
        return subprocess.run([*self.command, *arguments], check=True, capture_output=True, text=True).stdout
