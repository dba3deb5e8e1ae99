"""Finds the tensors in files of torch.save: one file, several with an index, or a universal checkpoint of DeepSpeed, for `ebb-checkpoint`:

    python3 -m ebb.checkpoint PATH       prints a line of JSON: names, shapes, and the place of each tensor in its file

The program reads the values itself, so memory does not depend on the model. A file is untrusted. No code of a pickle is executed: torch's
unpickler of torch.load(weights_only=True) reads it. torch.load itself does not say where a tensor lies, or only in new versions. With mmap=True
it maps the whole file, which Linux refuses if that is larger than the RAM.

A universal checkpoint is what DeepSpeed's ds_to_universal.py makes from a run's checkpoint:

    DIR/zero/model.layers.0.weight/fp32.pt      {"param": tensor}; from stage 3: the flat tensor
    DIR/zero/model.layers.0.weight/exp_avg.pt   each of the optimizer's states likewise
    DIR/zero/model.layers.0.weight/step.pt      the optimizer's steps
    DIR/zero/optimizer_state.pt                 the loss scaler and, from stage 3, the steps
    DIR/*_model_states.pt                       shapes, steps, tied and frozen parameters, buffers
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import stat
import struct
import sys
import warnings
import zipfile
from typing import Any

import torch
from torch import _weights_only_unpickler as weights_only

from ._files import FORMAT_NAMES
from ._library import Error, check, library

# The names in the pickle of a dict of tensors, beside those of storages.
_OF_TENSORS = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "torch.Size", "collections.OrderedDict"}
_OLD_BEGIN = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # a pickle of a number, before torch 1.6
_PICKLE_BYTES = 16 << 20
_INDEX_BYTES = 100_000_000
_STEPS = 10**15
# What DeepSpeed writes into *_model_states.pt itself. Other names are those of the program.
_OF_DEEPSPEED = set(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler data_sampler random_ltd "
    "sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version universal_checkpoint_info "
    "autotp_uc_info checkpoint_parallel_dimensions".split()
)


def _damaged(text: str) -> Error:
    return Error(text, "DATA_LOSS")


def _refused(text: str) -> Error:
    return Error(text, "INVALID_ARGUMENT")


def _open(path: str) -> io.BufferedReader:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        advice = "; a link is there, and links are not followed" if error.errno == errno.ELOOP else ""
        raise _refused(f"opening '{path}': {os.strerror(error.errno)}{advice}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _refused(f"'{path}' is not a regular file")
    return open(descriptor, "rb")


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise _refused(f"reading '{folder}': {os.strerror(error.errno)}") from None


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


class _Ignored:
    """Stands for a class or a function that is none of tensors. Nothing of it is called."""

    state: Any = None

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _File:
    """The objects of a file of torch.save, `root`. Its tensors have no values. `ignores_others`: objects of other classes are no error."""

    def __init__(self, path: str, ignores_others: bool = False):
        self.path = path
        self.storages: dict[int, tuple[torch.UntypedStorage, int, int]] = {}  # by address: where the bytes lie, and how many
        with _open(path) as file:
            if file.read(len(_OLD_BEGIN)) == _OLD_BEGIN:
                raise _refused(f"'{path}' is a file of torch before 1.6, which is not read: load it with torch and save it again")
            data = self._read_entries(file)
        try:
            self.root = self._unpickle(data, ignores_others)
        except Error:
            raise
        except pickle.UnpicklingError as error:
            raise _refused(f"the pickle of '{path}' is not one of torch.save's: {error}") from None
        except Exception as error:  # of torch and Python, in what is no pickle
            raise _damaged(f"the pickle of '{path}' is damaged: {type(error).__name__}: {error}") from None

    def _read_entries(self, file: io.BufferedReader) -> bytes:
        """Finds the bytes of each entry, and returns the pickle."""
        self.entries: dict[str, tuple[int, int]] = {}
        try:
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                        raise _refused(f"entry '{entry.filename}' of '{self.path}' is compressed or encrypted, which is not read: "
                                       "torch.save stores entries as they are")
                    file.seek(entry.header_offset)
                    header = file.read(30)
                    begin = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
                    if not header.startswith(b"PK\3\4") or begin + entry.file_size > archive.start_dir:
                        raise zipfile.BadZipFile(f"entry '{entry.filename}' lies outside of it")
                    if self.entries.setdefault(entry.filename, (begin, entry.file_size)) != (begin, entry.file_size):
                        raise zipfile.BadZipFile(f"entry '{entry.filename}' is there twice")
        except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, OSError) as error:
            raise _damaged(f"'{self.path}' is not a complete zip archive: {error}") from None
        pickles = [name for name in self.entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if not pickles:
            raise _refused(f"'{self.path}' is a zip archive, but not one that torch.save has written")
        self.folder = pickles[0].removesuffix("data.pkl")

        def text(name: str) -> bytes:
            begin, size = self.entries[name]
            if size > _PICKLE_BYTES:
                raise _refused(f"'{name}' of '{self.path}' has {size} bytes; at most {_PICKLE_BYTES} are read")
            file.seek(begin)
            return file.read(size)

        order = self.folder + "byteorder"
        if order in self.entries and text(order) != b"little":
            raise _refused(f"'{self.path}' is not little-endian: only little-endian numbers are read")
        return text(pickles[0])

    def _unpickle(self, data: bytes, ignores_others: bool) -> Any:
        is_of_tensors = lambda name: name in _OF_TENSORS or (name.startswith("torch.") and name.endswith("Storage"))
        others = sorted(name for name in weights_only.get_globals_in_pkl(io.BytesIO(data)) if not is_of_tensors(name))
        # A bytearray may ask for any amount of memory.
        refused = [name for name in others if not ignores_others or name == "builtins.bytearray"]
        if refused:
            raise _refused(f"the pickle of '{self.path}' names {', '.join(refused[:3])}, but only functions and classes of tensors are allowed")
        unpickler = weights_only.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._storage
        with warnings.catch_warnings(), torch.serialization.safe_globals([(_Ignored, name) for name in others]):
            warnings.simplefilter("ignore")
            return unpickler.load()

    def _storage(self, saved: tuple[str, Any, str, str, int]) -> torch.storage.TypedStorage:
        _, kind, key, _, elements = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        begin, size = self.entries.get(f"{self.folder}data/{key}", (0, -1))
        if size != elements * dtype.itemsize:
            has = f"{size} bytes" if size >= 0 else "no bytes"
            raise _damaged(f"'{self.path}' has {has} for the storage '{key}' of {elements} elements of {dtype}")
        storage = torch.UntypedStorage(size, device="meta")
        self.storages[storage._cdata] = storage, begin, size
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def place_of(self, tensor: Any, name: str) -> int:
        """The byte of the file at which the tensor's values begin. They follow in row-major order."""
        what = f"'{name}' of '{self.path}'"
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
            raise _refused(f"{what} is not a plain tensor")
        if not tensor.is_contiguous():
            raise _refused(f"{what} is not stored in row-major order: save tensor.contiguous()")
        _, begin, size = self.storages.get(tensor.untyped_storage()._cdata, (None, 0, -1))
        first = tensor.storage_offset() * tensor.itemsize
        if first + tensor.nbytes > size:
            raise _damaged(f"{what} is larger than its storage")
        return begin + first

    def number(self, value: Any, name: str) -> float:
        """A number, or a tensor's only element."""
        if isinstance(value, (int, float)):
            return value
        at = self.place_of(value, name)
        if value.numel() != 1 or value.is_complex():
            raise _refused(f"'{name}' of '{self.path}' is not a single number")
        with _open(self.path) as file:
            file.seek(at)
            return torch.frombuffer(bytearray(file.read(value.nbytes)), dtype=value.dtype).item()

    def shapes(self, given: Any) -> dict[str, list[int]]:
        """Shapes by name, from a dict, or a list of one for each group of the optimizer."""
        found = {}
        for group in given if isinstance(given, (list, tuple)) else [given]:
            for name, shape in group.items() if isinstance(group, dict) else ():
                if not isinstance(shape, (list, tuple)) or not all(type(size) is int and size >= 0 for size in shape):
                    raise _damaged(f"'{name}' of '{self.path}' has a shape that is not a list of sizes")
                found[name] = list(shape)
        return found


class _Source:
    def __init__(self, kind: str, path: str, is_model: bool):
        self.kind, self.path, self.is_model = kind, path, is_model
        self.tensors: list[dict[str, Any]] = []
        self.left_out: list[dict[str, str]] = []
        self.state: dict[str, float] = {}

    def add(self, file: _File, tensor: torch.Tensor, name: str, state: str, shape: list[int]) -> None:
        at, dtype = file.place_of(tensor, name), FORMAT_NAMES[tensor.dtype]
        if math.prod(max(size, 1) for size in shape) >= 2**53:
            raise _damaged(f"'{name}' of '{file.path}' has a shape that is not a list of sizes")
        self.tensors.append({"name": name, "state": state, "dtype": dtype, "shape": shape, "file": file.path, "at": at})

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.append({"name": name, "why": why})


def _may_train(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)


# Models.


def _of_model(path: str) -> _Source:
    source = _Source("files of torch", path, is_model=True)
    one = os.path.join(path, "pytorch_model.bin") if os.path.isdir(path) else path
    files = {one: None} if os.path.lexists(one) else _index(one + ".index.json")
    for file in sorted(files):
        _add_model(source, file, files[file])
    return source


def _index(path: str) -> dict[str, set[str]]:
    """The tensors of each file. Names of files must be plain names beside the index."""
    with _open(path) as file:
        text = file.read(_INDEX_BYTES + 1)
    try:
        weights = json.loads(text if len(text) <= _INDEX_BYTES else b"")["weight_map"].items()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _damaged(f"'{path}' is not an index of a model's files: it has no \"weight_map\"") from None
    files: dict[str, set[str]] = {}
    for tensor, name in weights:
        if not isinstance(name, str) or not name.endswith(".bin") or name.startswith(".") or "/" in name or "\0" in name or len(name) > 255:
            raise _damaged(f"'{path}' is not an index of a model's files: the file of '{tensor}' is {json.dumps(name)}, not the plain name of a "
                           ".bin file beside it")
        files.setdefault(os.path.join(os.path.dirname(path), name), set()).add(tensor)
    if not files:
        raise _damaged(f"'{path}' is not an index of a model's files: it names no tensors")
    return files


def _add_model(source: _Source, path: str, wanted: set[str] | None) -> None:
    file = _File(path)
    if not isinstance(file.root, dict):
        raise _refused(f"'{path}' has no dict of tensors, as state_dict() gives one")
    found = 0
    for name, tensor in file.root.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise _refused(f"'{path}' has {name!r}, which is not a named tensor: save only the model's state_dict()")
        if wanted is not None and name not in wanted:
            continue
        found += 1
        if _may_train(tensor):
            source.add(file, tensor, name, "", list(tensor.shape))
        else:
            source.leave_out(name, "no parameter")
    if wanted is not None and found != len(wanted):
        raise _damaged(f"'{path}' has {found} of the {len(wanted)} tensors that the index has for it: fetch both again")


# DeepSpeed's universal checkpoints.


class _Universal:
    def __init__(self, path: str):
        self.path = path
        self.source = _Source("universal checkpoint of DeepSpeed", path, is_model=False)
        self.steps: int | None = None
        self.has_states = False

    def read(self) -> _Source:
        zero = os.path.join(self.path, "zero")
        if not _is_folder(zero):
            raise _refused(f"'{zero}' is not a folder, or a link, which is not followed")
        # Each has the same facts, so one is read. Frozen parameters of stage 3 are in pieces in all of them.
        model_states = [os.path.join(self.path, name) for name in _names_in(self.path) if name.endswith("_model_states.pt")]
        file = _File(model_states[0], ignores_others=True) if model_states else None
        facts = file.root if file and isinstance(file.root, dict) else {}
        self.shapes = file.shapes(facts.get("param_shapes")) if file else {}
        names = facts.get("buffer_names")
        self.reasons = {name: "a buffer" for name in names if isinstance(name, str)} if isinstance(names, list) else {}
        tied = facts.get("shared_params")
        for name, other in tied.items() if isinstance(tied, dict) else ():
            self.reasons.setdefault(name, f"tied to {other}")
        self._read_optimizer_state(os.path.join(zero, "optimizer_state.pt"))
        parameters = _names_in(zero)
        for name in parameters:
            folder = os.path.join(zero, name)
            if _is_folder(folder):
                self._add_parameter(name, folder)
            elif name != "optimizer_state.pt":
                raise _refused(f"'{folder}' is neither a parameter's folder nor a known file")
        if file:
            self._add_frozen(file, facts, set(parameters), in_pieces=len(model_states) > 1)
        self._set_steps(facts)
        return self.source

    def _read_optimizer_state(self, path: str) -> None:
        if not os.path.lexists(path):
            return
        file = _File(path, ignores_others=True)
        root = file.root if isinstance(file.root, dict) else {}
        # DeepSpeed's scaler is an object. Its members are a dict.
        members = getattr(root.get("loss_scaler"), "state", None)
        if isinstance(members, dict):
            number = lambda key, otherwise: file.number(members[key], key) if key in members else otherwise
            steps = lambda value: int(value) if 0 < value < _STEPS else 0
            self.source.state = {
                "scale": number("cur_scale", 1),
                # The step after an overflow is not part of the window yet.
                "clean_steps": steps(number("cur_iter", 0) - number("last_overflow_iter", -1) - 1),
                "hysteresis_left": steps(number("cur_hysteresis", 0)),
            }
        # At stage 3 all parameters of an optimizer's group have one count.
        inner = root.get("optimizer_state_dict")
        groups = inner.get("state") if isinstance(inner, dict) else None
        for group in groups.values() if isinstance(groups, dict) else ():
            if isinstance(group, dict) and "step" in group:
                self._add_step(file, group["step"])

    def _add_step(self, file: _File, value: Any) -> None:
        """All parameters must have the same step, because Ebb's optimizers have one count."""
        step = file.number(value, "step")
        if not 0 <= step < _STEPS or step != int(step):
            raise _refused(f"'{file.path}' has the step {step}, which is not a count")
        if self.steps not in (None, step):
            raise _refused(f"'{file.path}' says {int(step)} steps, but another file says {self.steps}: all parameters must have one count")
        self.steps = int(step)

    def _add_parameter(self, name: str, folder: str) -> None:
        files = _names_in(folder)
        for file in files:
            if file.isdigit():
                raise _refused(f"'{folder}' has slices of tensor-parallel ranks, which ds_to_universal.py has not merged: convert the run's "
                               "checkpoint again")
            if not file.endswith(".pt") or file == ".pt":
                raise _refused(f"'{folder}/{file}' is not a file of a parameter")
        if "fp32.pt" not in files:
            raise _refused(f"'{folder}' lacks fp32.pt, the parameter's values")
        if name in self.reasons:
            return self.source.leave_out(name, self.reasons[name])
        shape = self._add_tensor(name, "", os.path.join(folder, "fp32.pt"), None)
        for file in files:
            path = os.path.join(folder, file)
            if file == "step.pt":
                step = _File(path)
                self._add_step(step, step.root)
            elif file != "fp32.pt":
                self.has_states = True
                self._add_tensor(name, file.removesuffix(".pt"), path, shape)

    def _add_tensor(self, name: str, state: str, path: str, wanted: list[int] | None) -> list[int]:
        """Adds the tensor and returns its shape. `wanted`: the shape of the values, which a state must have, too."""
        file = _File(path)
        is_flat = isinstance(file.root, torch.Tensor)
        tensor = file.root if is_flat else file.root.get("param") if isinstance(file.root, dict) else None
        if not isinstance(tensor, torch.Tensor):
            raise _refused(f"'{path}' is neither a tensor nor a dict with \"param\"")
        if not _may_train(tensor):
            raise _refused(f"'{path}' has numbers of {tensor.dtype}; fp32, bf16 and fp16 are read")
        shape = list(tensor.shape)
        if is_flat and name not in self.shapes:
            raise _refused(f"'{path}' is a flat tensor, as of stage 3, and \"param_shapes\" of a *_model_states.pt does not have its shape")
        known = self.shapes[name] if is_flat else shape
        other = known if math.prod(known) != tensor.numel() else wanted if wanted not in (None, known) else None
        if other is not None:
            raise _damaged(f"'{path}' has the shape {shape if other is known else known}, its parameter {other}")
        self.source.add(file, tensor, name, state, known)
        return known

    def _add_frozen(self, file: _File, facts: dict[str, Any], seen: set[str], in_pieces: bool) -> None:
        """Frozen parameters are whole in `module`, or, at stage 3, each rank's flat piece."""
        pieces = facts.get("frozen_param_fragments")
        given = pieces if isinstance(pieces, dict) else facts.get("module")
        shapes = file.shapes(facts.get("frozen_param_shapes"))
        for name, tensor in given.items() if isinstance(given, dict) else ():
            if not isinstance(name, str) or not name or name in seen or name in self.reasons or not isinstance(tensor, torch.Tensor):
                continue
            shape = shapes.get(name, list(tensor.shape))
            if in_pieces:
                self.source.leave_out(name, "in pieces, in several *_model_states.pt")
            elif not _may_train(tensor) or not 0 < math.prod(shape) <= tensor.numel():
                self.source.leave_out(name, "no parameter with complete values")
            else:
                self.source.add(file, tensor, name, "", shape)

    def _set_steps(self, facts: dict[str, Any]) -> None:
        counts = {key: facts[key] for key in ("global_steps", "skipped_steps") if type(facts.get(key)) is int}
        if any(abs(count) >= _STEPS for count in counts.values()):
            raise _refused(f"'{self.path}' says {counts}, which is impossible")
        skipped = counts.get("skipped_steps", 0)
        if self.steps is None and "global_steps" in counts:
            self.steps = counts["global_steps"] - skipped
        if self.steps is None and self.has_states:
            raise _refused(f"'{self.path}' has optimizer states, but no number of steps: step.pt, optimizer_state.pt or a *_model_states.pt must "
                           "have it")
        self.source.state.update(applied_steps=self.steps or 0, skipped_steps=skipped)


def _of_universal(path: str) -> _Source:
    latest = os.path.join(path, "latest_universal")
    if not os.path.lexists(os.path.join(path, "zero")):
        with _open(latest) as file:
            name = os.fsdecode(file.read(4096)).rstrip("\r\n")
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise _damaged(f"'{latest}' has {json.dumps(name)}, not the plain name of a folder beside it")
        path = os.path.join(path, name)
        if not _is_folder(path):
            raise _refused(f"'{latest}' names '{path}', which is not a folder")
    return _Universal(path).read()


def answer(path: str) -> str:
    """The line for ebb-checkpoint: what it reads, or the error and its code."""
    try:
        is_universal = any(os.path.lexists(os.path.join(path, name)) for name in ("zero", "latest_universal"))
        is_model = not is_universal or any(os.path.lexists(os.path.join(path, "pytorch_model.bin" + end)) for end in ("", ".index.json"))
        found = vars(_of_model(path) if is_model else _of_universal(path))
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except Error as error:
        return json.dumps({"error": str(error), "code": error.code})
    except (UnicodeError, ValueError, OSError) as error:
        return json.dumps({"error": f"'{path}' cannot be read: {error}", "code": "INVALID_ARGUMENT"})


def import_tensors(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Writes the tensors at `path` as a checkpoint in `folder`, which Engine.load() takes: `ebb-checkpoint import`, of one rank."""
    check(library.ebb_import_tensors(answer(os.fspath(path)).encode(), os.fspath(folder).encode()))


def facts_of_universal(path: str) -> dict[str, Any]:
    """What a universal checkpoint of DeepSpeed's has beside tensors: counters, the schedule, the caller's own state, and the numbers among the options of
    the optimizer's groups. The caller's objects are unpickled, so read only what you trust."""
    files = sorted(name for name in _names_in(path) if name.endswith("_model_states.pt"))
    facts = torch.load(os.path.join(path, files[0]), map_location="cpu", weights_only=False) if files else {}
    file = os.path.join(path, "zero", "optimizer_state.pt")
    root = _File(file, ignores_others=True).root if os.path.lexists(file) else {}
    groups = root.get("param_groups") if isinstance(root, dict) else None
    is_plain = lambda value: isinstance(value, (bool, int, float)) or isinstance(value, tuple) and all(isinstance(one, float) for one in value)
    return {
        "client_state": {name: value for name, value in facts.items() if name not in _OF_DEEPSPEED},
        "groups": [{key: value for key, value in group.items() if is_plain(value)} for group in groups or ()],
        "lr_scheduler": facts.get("lr_scheduler"),
        **{name: int(facts.get(name, 0)) for name in ("global_steps", "global_samples")},
    }


def main(path: str) -> None:
    sys.stdout.buffer.write(answer(path).encode(errors="replace") + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
