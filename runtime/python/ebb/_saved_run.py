"""Reads a checkpoint of Ebb's without an engine (docs/format.md). It checks sizes, and no checksums: `ebb-checkpoint inspect` does."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from pathlib import Path
from typing import Any, Iterator, Mapping

import torch

from ._library import Error

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}


class SavedRun(Mapping[str, torch.Tensor]):
    """The values of a run's parameters by their names. A trainable one is its fp32 master. A value is read when it is asked for."""

    def __init__(self, path: str | os.PathLike[str]):
        """`path`: a checkpoint, or a folder of checkpoints, of which the newest is read."""
        folder = Path(path)
        latest = folder / "latest"
        self.folder = folder / latest.read_text().strip() if latest.is_file() else folder
        try:
            self.manifest = json.loads((self.folder / "manifest.json").read_text())
            self.parameters: dict[str, dict[str, Any]] = {one["name"]: one for one in self.manifest["parameters"]}
            self._slices: dict[str, list[tuple[int, int, Path, int, torch.dtype]]] = {}  # by class and parameter
            for rank in range(len(self.manifest["files"])):
                self._add_file(self.folder / f"rank-{rank:05}-of-{len(self.manifest['files']):05}.safetensors")
        except FileNotFoundError as error:
            raise Error(f"'{folder}' is no checkpoint of Ebb's, nor a folder of them: there is no '{error.filename}'", "NOT_FOUND") from None
        except (ValueError, LookupError, TypeError) as error:
            raise self._damaged(str(error)) from None

    def _add_file(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            array, _, place = name.rpartition("@")
            begin, end = map(int, place.split(":"))
            first, last = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            if 8 + length + last > path.stat().st_size or last - first != (end - begin) * dtype.itemsize:
                raise self._damaged(f"'{path}' is too short for '{name}'")
            self._slices.setdefault(array, []).append((begin, end, path, 8 + length + first, dtype))

    def _damaged(self, why: str) -> Error:
        return Error(f"the checkpoint '{self.folder}' is damaged: {why}. `ebb-checkpoint inspect` checks all of it", "DATA_LOSS")

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read("master" if self.parameters[name]["trainable"] else "parameter", name)

    def state(self, name: str, state: str) -> torch.Tensor:
        """An optimizer state, such as "exp_avg"."""
        if state not in self.parameters[name]["states"]:
            raise KeyError(state)
        return self._read(state, name)

    def _read(self, kind: str, name: str) -> torch.Tensor:
        shape, slices = self.parameters[name]["shape"], self._slices.get(f"{kind}/{name}", [])
        elements = math.prod(shape)
        if sum(end - begin for begin, end, *_ in slices) != elements:
            raise self._damaged(f"its files do not have each element of '{kind}/{name}' once")
        values = torch.empty(elements, dtype=slices[0][4])
        for begin, end, path, at, dtype in slices:
            with path.open("rb") as file:
                file.seek(at)
                if file.readinto(values[begin:end].view(torch.uint8).numpy()) != (end - begin) * dtype.itemsize:
                    raise self._damaged(f"'{path}' is too short for '{name}'")
        return values.view(shape)

    @property
    def trainer(self) -> bytes:
        """What save() got as `trainer`."""
        return self._bytes("c.trainer")

    @property
    def buffers(self) -> dict[str, Any]:
        """What the model's state_dict() had beside parameters, on rank 0."""
        from ._buffers import read

        saved = self._bytes("c.buffers")
        return read(saved) if saved else {}

    def _bytes(self, name: str) -> bytes:
        return base64.b64decode(self.manifest.get("trainer", {}).get(name, ""))


def write_model_files(values: Mapping[str, Any], folder: str | os.PathLike[str], file_bytes: int | str | None, safetensors: bool) -> None:
    """Writes tensors as pytorch_model.bin or model.safetensors, or several files and their index, for from_pretrained. In safetensors files a tied
    value has its first name alone. `file_bytes`: of a file at most, such as 10**9 or "5GB"."""
    os.makedirs(folder, exist_ok=True)
    stem, ending = ("model", "safetensors") if safetensors else ("pytorch_model", "bin")
    parts = _parts(values, _bytes_in(file_bytes), once=safetensors)
    numbers = [f"-{number:05}-of-{len(parts):05}" for number in range(1, len(parts) + 1)] if len(parts) > 1 else [""]
    files = {f"{stem}{number}.{ending}": part for number, part in zip(numbers, parts)}
    for name, part in files.items():
        path = os.path.join(folder, name)
        if safetensors:
            from safetensors.torch import save_file

            save_file(part, path, metadata={"format": "pt"})
        else:
            torch.save(part, path)
    if len(parts) > 1:
        weight_map = {key: name for name, part in files.items() for key in part}
        index = {"metadata": {"total_size": sum(value.nbytes for part in parts for value in part.values())}, "weight_map": weight_map}
        Path(folder, f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _bytes_in(text: int | str | None) -> float:
    if text is None:
        return math.inf
    found = re.fullmatch(r"\s*(\d+)\s*(|[KMGT]I?B)\s*", str(text).upper())
    if found is None:
        raise ValueError(f"{text!r} is no size of a file: give a number of bytes, or a text such as \"5GB\"")
    return int(found[1]) * _UNITS[found[2]]


def _parts(values: Mapping[str, Any], most: float, once: bool) -> list[dict[str, torch.Tensor]]:
    parts: list[dict[str, torch.Tensor]] = [{}]
    seen: set[int] = set()
    size = 0
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or once and id(value) in seen:
            continue
        seen.add(id(value))
        if parts[-1] and size + value.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][key] = value
        size += value.nbytes
    return parts
