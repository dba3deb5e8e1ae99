"""Saves an engine's model: state dicts, and safetensors files like those of Hugging Face's libraries. Checkpoints that are under way."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import os
import re
import shutil
import types
from ctypes import byref
from pathlib import Path
from typing import Any, Callable, Mapping

import torch
from torch import nn

from ._entries import Entries
from ._files import FORMAT_NAMES
from ._library import Error, check, library
from ._state import State
from ._tensors import Memory


def load_universal(engine: Any, path: str | os.PathLike, **options: bool) -> tuple[int, bytes, bytes]:
    """Collective: rank 0 imports it into a folder beside it, which all ranks load and which is then removed."""
    from .checkpoint import import_tensors  # which `python -m ebb.checkpoint` runs by itself

    made, failure = f"{os.path.abspath(path)}.ebb-import", None
    if engine.world.rank == 0:
        shutil.rmtree(made, ignore_errors=True)
        try:
            import_tensors(path, made)
        except Error as error:
            failure = error
    try:
        engine._state.agree(failure, failure)
        return engine.load(made, **options)
    finally:
        with contextlib.suppress(Error):  # of an engine that has failed
            engine._state.agree(None, None)
        if engine.world.rank == 0:
            shutil.rmtree(made, ignore_errors=True)


def attach(entries: Entries, zero_grad: Callable[..., None]) -> list[Any]:
    """Makes model.state_dict() gather, model.load_state_dict() write and model.zero_grad() call the engine. Copying the model raises."""
    model = entries.state.model

    def load(values: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return load_state_dict(entries, values, strict)

    def refuse(*arguments: Any) -> Any:
        raise Error(
            f"{type(model).__name__} is sharded: its parameters are on several ranks, so it cannot be copied or pickled. "
            "engine.state_dict() has its values, and save_pretrained() writes them"
        )

    attributes = {"load_state_dict": load, "zero_grad": zero_grad, "__deepcopy__": refuse, "__reduce_ex__": refuse}
    model.__dict__.update(attributes)
    return [entries, types.SimpleNamespace(remove=lambda: [model.__dict__.pop(name, None) for name in attributes])]


def load_state_dict(entries: Entries, values: Mapping[str, Any], strict: bool = True) -> Any:
    entries.state.between_forwards()
    entries.state.check_can_write()
    entries.given = []
    of_parameters, missing, unexpected = entries.load(values)
    if strict and (missing or unexpected):
        lacks = f"missing are {', '.join(missing)}" if missing else ""
        has = f"the model has no {', '.join(unexpected)}" if unexpected else ""
        raise Error(f"load_state_dict: {lacks}{', and ' if lacks and has else ''}{has}", "INVALID_ARGUMENT")
    if of_parameters:
        entries.state.write(of_parameters)
    from torch.nn.modules.module import _IncompatibleKeys

    return _IncompatibleKeys(missing, unexpected)


class Ticket:
    """A save that is under way. The calls are not collective. Any thread may call done(). Any thread may call wait() after the save has
    begun. Before that, wait() raises on every thread but the one that called save(), because two threads could wait for each other."""

    def __init__(self, memory: Memory, number: int):
        self._memory = memory
        self._number = number

    def done(self) -> bool:
        """Whether the save has ended. Raises its error, which is the same on every rank."""
        ended = ctypes.c_int32()
        check(library.ebb_save_wait(self._memory.handle, self._number, byref(ended)))
        return bool(ended.value)

    def wait(self) -> None:
        """Waits until the checkpoint is on the disk and has its name. Raises the error of the save."""
        check(library.ebb_save_wait(self._memory.handle, self._number, None))


def save_pretrained(of_model: Entries, folder: Path, trainable_only: bool, dtype: torch.dtype | None, file_bytes: int) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise Error(f"dtype={dtype} would cut the values: give a floating-point type", "INVALID_ARGUMENT")
    state = of_model.state
    model = state.model
    entries = of_model.of_names()
    adapter, prefix = _adapter_of(model) if trainable_only else (None, "")
    if adapter:
        tensors = [(prefix + key, tensor) for key, tensor in _of_adapter(state, entries, adapter).items()]
    else:
        tensors = _once(entries, trainable_only)
    if not tensors:
        raise Error("save_pretrained: nothing is trainable", "INVALID_ARGUMENT")
    cast = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # the state of a quantized weight keeps its type
    types = {key: dtype if dtype is not None and tensor.is_floating_point() and id(tensor) in cast else tensor.dtype for key, tensor in tensors}
    writes = state.world.rank == 0
    stem = "adapter_model" if adapter else "model"
    failure: Exception | None = None  # of rank 0, which nevertheless makes all the collective calls

    def attempt(call: Any, *arguments: Any) -> Any:
        nonlocal failure
        if writes and failure is None:
            try:
                return call(*arguments)
            except Exception as error:
                failure = error

    writer = attempt(_Writer, folder, stem, tensors, types, file_bytes)
    for key, tensor in tensors:
        piece = attempt(lambda: writer.begin(key))

        def take(values: Any, begin: int, end: int) -> None:
            numbers = (ctypes.c_float * (end - begin)).from_address(ctypes.addressof(values.contents))
            attempt(lambda: piece(torch.frombuffer(numbers, dtype=torch.float32)))

        if isinstance(tensor, nn.Parameter):
            state.gather_pieces(tensor._ebb_name, take, rank=0)
        else:
            attempt(lambda: piece(tensor.detach().cpu().contiguous().view(-1)))

    def finish() -> None:
        writer.finish()
        if adapter:
            configuration = copy.copy(model.peft_config[adapter])
            configuration.inference_mode = True
            configuration.save_pretrained(str(folder))
            return
        for name in ("config", "generation_config"):
            described = getattr(model, name, None)
            if hasattr(described, "save_pretrained"):
                described.save_pretrained(str(folder))

    attempt(finish)
    if failure is not None and writer is not None:
        try:
            writer.drop()
        except OSError:
            pass  # the first error is the one to raise
    words = f"save_pretrained has not written '{folder}': {type(failure).__name__}: {failure}"
    state.agree(None if failure is None else Error(words), failure)


def _once(entries: Mapping[str, Any], trainable_only: bool) -> list[tuple[str, torch.Tensor]]:
    """The entries for a file, shared tensors under their first key."""
    chosen: dict[int, tuple[str, torch.Tensor]] = {}
    for key, tensor in entries.items():
        if trainable_only and not (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
            continue
        if isinstance(tensor, torch.Tensor):
            chosen.setdefault(id(tensor), (key, tensor))
        elif tensor is not None:
            raise Error(f"save_pretrained: '{key}' is a {type(tensor).__name__}, and safetensors files hold tensors alone: "
                        "torch.save(engine.state_dict(), file) has it", "UNIMPLEMENTED")
    return list(chosen.values())


def _adapter_of(model: nn.Module) -> tuple[str | None, str]:
    """The active adapter, and what stands in its file before the model's own names."""
    if not hasattr(model, "peft_config"):
        return None, ""
    active = getattr(model, "active_adapters", None)
    if callable(active):  # a model of transformers that has made the adapter itself, with add_adapter()
        names = active()
        if len(names) > 1:
            raise Error(f"save_pretrained: the adapters {', '.join(names)} are active: activate one, model.set_adapter(name)", "UNIMPLEMENTED")
        return names[0], "base_model.model."
    return getattr(model, "active_adapter", None), ""


def _of_adapter(state: State, entries: Mapping[str, Any], adapter: str) -> dict[str, torch.Tensor]:
    """Collective: the entries of an adapter's file, as peft chooses and names them. A value that peft computes, such as a prompt's, is computed
    from gathered parameters, in modules that every rank runs."""
    import peft

    model = state.model
    kind = model.peft_config[adapter].peft_type
    if kind == peft.PeftType.MULTITASK_PROMPT_TUNING:
        raise Error("save_pretrained of a multitask prompt: peft reads its parameters outside of their units. Use engine.save", "UNIMPLEMENTED")
    with torch.no_grad():
        if not model.peft_config[adapter].is_prompt_learning:
            chosen = peft.get_peft_model_state_dict(model, entries, adapter)
            given = {id(value) for value in entries.values()}
            if all(id(value) in given for value in chosen.values()):
                return chosen
        is_trained = lambda value: isinstance(value, nn.Parameter) and value.requires_grad
        trained = {key: state.gather(value._ebb_name) if is_trained(value) else value for key, value in entries.items()}
        chosen = peft.get_peft_model_state_dict(model, trained, adapter)
    state.between_forwards()
    return chosen


def _format_name(key: str, dtype: torch.dtype) -> str:
    if dtype not in FORMAT_NAMES:
        raise Error(f"'{key}' is {dtype}, which safetensors files have no name for", "UNIMPLEMENTED")
    return FORMAT_NAMES[dtype]


def _header(tensors: list[tuple[str, torch.Tensor]], types: Mapping[str, torch.dtype], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with these tensors in these types."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for key, tensor in tensors:
        size = tensor.numel() * types[key].itemsize
        header[key] = {"dtype": _format_name(key, types[key]), "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shapes(model: nn.Module, file: str | os.PathLike[str]) -> None:
    """Writes the names, types and shapes of a model's parameters for `ebb-plan --safetensors FILE`, and which of them are frozen
    (`requires_grad`). Bytes of bitsandbytes come with the shape that they stand for. The model may be on the meta device. The file has
    zeros for values, which take no space on the disk."""
    tensors = list(model.named_parameters())
    metadata = {}
    frozen = [name for name, parameter in tensors if not parameter.requires_grad]
    if frozen:
        metadata["ebb.frozen"] = json.dumps(frozen)
    states = {name: getattr(parameter, "quant_state", None) for name, parameter in tensors}
    shapes = {name: list(state.shape) for name, state in states.items() if getattr(state, "shape", None)}
    if shapes:
        metadata["ebb.shapes"] = json.dumps(shapes)
    header = _header(tensors, {name: parameter.dtype for name, parameter in tensors}, metadata)
    with open(file, "wb") as out:
        out.write(header)
        out.truncate(len(header) + sum(parameter.nbytes for _, parameter in tensors))


def replace_text(path: Path, text: str, unfinished: Path | None = None) -> None:
    """Replaces a file by way of the file `unfinished`, by default .NAME.part, so that it has the old text or all of the new one."""
    unfinished = unfinished or path.with_name(f".{path.name}.part")
    _write(unfinished, text)
    os.replace(unfinished, path)


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class _Writer:
    """Writes `folder`/`stem`.safetensors, or several files and their index. The files get their names when all of them are written. A
    reader that begins at any moment finds the earlier model or the new one: it takes one file before an index, and only files that the
    index names."""

    def __init__(self, folder: Path, stem: str, tensors: list[tuple[str, torch.Tensor]], types: Mapping[str, torch.dtype], file_bytes: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.types = types
        parts: list[list[tuple[str, torch.Tensor]]] = [[]]
        sizes = [0]
        for key, tensor in tensors:
            _format_name(key, types[key])  # an error comes before any file
            size = tensor.numel() * types[key].itemsize
            if parts[-1] and sizes[-1] + size > file_bytes:
                parts.append([])
                sizes.append(0)
            parts[-1].append((key, tensor))
            sizes[-1] += size
        self.index: dict[str, Any] | None = None
        if len(parts) == 1:
            names = [f"{stem}.safetensors"]
        else:
            names = [f"{stem}-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
            weight_map = {key: name for name, part in zip(names, parts) for key, _ in part}
            self.index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        self.stem = stem
        self.part_of = {key: i for i, part in enumerate(parts) for key, _ in part}
        self.parts, self.names = parts, names
        self.at = -1
        self.file: Any = None

    def begin(self, key: str) -> Any:
        if self.part_of[key] != self.at:
            self._close()
            self.at = self.part_of[key]
            self.file = open(self._unfinished(self.names[self.at]), "wb")
            self.file.write(_header(self.parts[self.at], self.types))
        kind = self.types[key]

        def piece(values: torch.Tensor) -> None:
            self.file.write(values.to(kind).contiguous().view(torch.uint8).numpy().tobytes())

        return piece

    def _unfinished(self, name: str) -> Path:
        return self.folder / f".{name}.part"

    def _close(self) -> None:
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def _name(self, name: str) -> None:
        os.replace(self._unfinished(name), self.folder / name)

    def _keep_earlier(self, index: str) -> None:
        """Gives files of an earlier index that are to be replaced second names. That index has these until the new one replaces it."""
        earlier = self.folder / index
        try:
            described = json.loads(earlier.read_text())
            second = {name: name.replace(".safetensors", "-earlier.safetensors") for name in self.names}
            file_of = described["weight_map"]
            for name in set(file_of.values()).intersection(second):
                (self.folder / second[name]).unlink(missing_ok=True)
                os.link(self.folder / name, self.folder / second[name])
            described["weight_map"] = {key: second.get(name, name) for key, name in file_of.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            earlier.unlink(missing_ok=True)  # it is damaged, or the file system has no links: better no model than a mixed one
            return
        replace_text(earlier, json.dumps(described), self._unfinished(f"earlier-{index}"))

    def finish(self) -> None:
        """Names the files, and removes those of an earlier call."""
        self._close()
        index = f"{self.stem}.safetensors.index.json"
        if self.index is not None:
            _write(self._unfinished(index), json.dumps(self.index, indent=2, sort_keys=True) + "\n")
            self._keep_earlier(index)
        for name in self.names:
            self._name(name)
        names = set(self.names)
        if self.index is not None:
            self._name(index)
            names.add(index)
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)  # the new names are on the disk before old files are removed
        os.close(folder)
        self._remove(names, finished=True)

    def drop(self) -> None:
        """Removes what is unfinished."""
        try:
            if self.file is not None:
                self.file.close()  # it writes what is left once more
        finally:
            self._remove(set(), finished=False)

    def _remove(self, names: set[str], finished: bool) -> None:
        """Removes unfinished files, and finished ones that are not in `names`."""
        ours = re.compile(rf"(\.(?:earlier-)?)?{re.escape(self.stem)}(-\d{{5}}-of-\d{{5}}(-earlier)?)?\.safetensors(\.index\.json)?(\.part)?")
        # The index first, because it names the others.
        for path in sorted(self.folder.iterdir(), key=lambda path: path.suffix != ".json"):
            match = ours.fullmatch(path.name)
            if not match or bool(match[1]) != bool(match[5]):
                continue
            if match[5] or (finished and path.name not in names):
                path.unlink()
