"""What ebb.checkpoint finds in files of torch.save, for ebb-checkpoint: where each tensor lies, and of a damaged or hostile file an error that
names it. The values that the program reads there: tests/checkpoint/torch_files_test.py."""

import argparse
import json
import os
import random
import struct
import zipfile
from collections import OrderedDict

import pytest
import torch

from ebb import checkpoint


def answer(path):
    return json.loads(checkpoint.answer(str(path)))


def refused(path, said, code="INVALID_ARGUMENT"):
    found = answer(path)
    assert said in found.get("error", ""), found
    assert found["code"] == code and "Traceback" not in found["error"]
    return found["error"]


def damaged(path, said):
    return refused(path, said, "DATA_LOSS")


def values_of(found):
    """The bytes that ebb-checkpoint reads, by name and state."""
    values = {}
    for tensor in found["tensors"]:
        size = {"F32": 4, "BF16": 2, "F16": 2}[tensor["dtype"]]
        for dimension in tensor["shape"]:
            size *= dimension
        with open(tensor["file"], "rb") as file:
            file.seek(tensor["at"])
            values[tensor["name"], tensor["state"]] = file.read(size)
        assert len(values[tensor["name"], tensor["state"]]) == size
    return values


def bytes_of(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def rewritten(path, change=lambda name, data: (name, data), method=zipfile.ZIP_STORED, more=()):
    """Writes the archive again, with changed entries."""
    with zipfile.ZipFile(path) as archive:
        entries = [(entry, archive.read(entry)) for entry in archive.namelist()]
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in [change(*entry) for entry in entries] + list(more):
            archive.writestr(name, data)


def with_pickle(path, old, new):
    def change(name, data):
        assert not name.endswith("data.pkl") or old in data
        return name, data.replace(old, new) if name.endswith("data.pkl") else data

    rewritten(path, change)


class Named:
    """Pickled as a call of a function with that name."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def test_tensors_of_every_dtype_and_form(tmp_path):
    tensors = {"half": torch.randn(5).half(), "bf16": torch.nn.Parameter(torch.randn(2, 3).bfloat16()), "scalar": torch.tensor(3.5),
               "view": torch.arange(10.0)[3:5], "empty": torch.zeros(0, 4), "shared": torch.arange(10.0), "column": torch.arange(3.0)[:, None].t()}
    others = {"long": torch.arange(3), "flags": torch.tensor([True]), "bytes": torch.zeros(2, dtype=torch.uint8), "complex": torch.randn(2) * 1j}
    torch.save(OrderedDict(tensors | others), tmp_path / "m.bin")
    found = answer(tmp_path / "m.bin")
    assert values_of(found) == {(name, ""): bytes_of(tensor) for name, tensor in tensors.items()}
    assert [tensor["shape"] for tensor in found["tensors"]] == [list(tensor.shape) for tensor in tensors.values()]
    assert found["left_out"] == [{"name": name, "why": "no parameter"} for name in others]


def test_tensors_of_a_device_that_is_not_here(tmp_path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"w": torch.empty(2, 3, device="cuda")}, tmp_path / "m.bin")
    (tensor,) = answer(tmp_path / "m.bin")["tensors"]
    assert tensor["shape"] == [2, 3]


def test_a_folder_of_one_file_or_several(tmp_path):
    one, index = tmp_path / "pytorch_model.bin", tmp_path / "pytorch_model.bin.index.json"
    torch.save({"a": torch.arange(3.0)}, one)
    index.write_text("{")  # as by transformers, the file is read and not the index
    found = answer(tmp_path)
    assert found["is_model"]
    assert values_of(found) == {("a", ""): bytes_of(torch.arange(3.0))}
    one.rename(tmp_path / "part-1.bin")
    torch.save({"b": torch.ones(2), "not in the index": torch.ones(1)}, tmp_path / "part-2.bin")
    index.write_text('{"weight_map": {"b": "part-2.bin", "a": "part-1.bin"}}')
    assert [tensor["name"] for tensor in answer(tmp_path)["tensors"]] == ["a", "b"]
    index.write_text('{"weight_map": {"a": "part-1.bin", "c": "part-2.bin"}}')
    damaged(tmp_path, "part-2.bin' has 0 of the 1 tensors")
    index.write_text('{"weight_map": {"a": "part-1.bin", "b": "part-3.bin"}}')
    refused(tmp_path, "part-3.bin': No such file")
    for name in ("../x/part-1.bin", "/etc/part-1.bin", ".bin", "part-1.safetensors", "", "x\0.bin", 7):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        damaged(tmp_path, "not the plain name")
    for text in ("", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {}}', "[" * 100_000):
        index.write_text(text)
        damaged(tmp_path, "is not an index")


def test_a_model_has_named_tensors_and_nothing_else(tmp_path):
    file = tmp_path / "m.bin"
    tensor = torch.zeros(3)
    for wrong, said in (({"a": tensor, "epoch": 3}, "'epoch', which is not a named tensor"), ({"model": {"a": tensor}}, "'model'"),
                        ({1: tensor}, "1, which"), ([tensor], "no dict of tensors"), ({"a": torch.zeros(3, 4).t()}, "row-major"),
                        ({"a": torch.nn.Linear(2, 2)}, "torch.nn.modules.linear.Linear, but only"),
                        ({"a": torch.eye(3).to_sparse()}, "_rebuild_sparse_tensor, "),
                        ({"a": torch.zeros(3).to(torch.float8_e4m3fn)}, "_rebuild_tensor_v3, "),
                        ({"é\udc80": tensor}, "surrogates not allowed")):
        torch.save(wrong, file)
        assert str(file) in refused(file, said)


def test_no_code_of_a_pickle_runs(tmp_path):
    file = tmp_path / "m.bin"
    for call in ((os.system, (f"touch {tmp_path}/ran",)), (eval, ("1",)), (getattr, (str, "upper")), (bytearray, (1 << 40,))):
        torch.save({"a": Named(*call)}, file)
        refused(file, f"names {'posix' if call[0] is os.system else 'builtins'}.{call[0].__name__}")
        for states in (False, True):  # where other objects are ignored
            (tmp_path / "zero").mkdir(exist_ok=True)
            torch.save({"args": Named(*call)}, tmp_path / ("x_model_states.pt" if states else "zero/optimizer_state.pt"))
            found = answer(tmp_path)
            assert ("error" in found) == (call[0] in (os.system, bytearray)), found
            for path in (tmp_path / "x_model_states.pt", tmp_path / "zero/optimizer_state.pt"):
                path.unlink(missing_ok=True)
    torch.save({"a": Named(os.system, ("true",))}, file, pickle_protocol=4)
    refused(file, "not one of torch.save's")
    assert not (tmp_path / "ran").exists()


def test_a_damaged_pickle(tmp_path):
    file = tmp_path / "m.bin"
    torch.save({"abc": torch.zeros(2, 3)}, file)
    whole = file.read_bytes()
    for old, new, said in ((b"K\x02K\x03", b"K\x03K\x03", "larger than its storage"), (b"K\x06t", b"K\x07t", "24 bytes for the storage '0' of 7"),
                           (b"QK\x00", b"QK\x01", "larger than its storage"), (b"QK\x00", b"QJ\xff\xff\xff\xff", "damaged"),
                           (b"FloatStorage", b"HalfStorage", "24 bytes for the storage '0' of 6 elements of torch.float16"),
                           (b"X\1\0\0\x000", b"X\1\0\0\x007", "no bytes for the storage '7'"), (b"K\x03K\x01", b"K\x03I\x01", "not one of"),
                           (b"K\x02K\x03", b"K\x02J\xfd\xff\xff\xff", "damaged"), (b"abc", b"a\xffc", "damaged"), (b".", b"", "damaged")):
        file.write_bytes(whole)
        with_pickle(file, old, new)
        found = answer(file)
        assert said in found["error"] and str(file) in found["error"], found
    for data in (b"", b".", b"\x80\x02h\x07.", b"N" * 100 + b"t.", b"\x80\x02(" + b"\x85" * 1000, b"X\xff\xff\xff\x7f."):
        file.write_bytes(whole)
        rewritten(file, lambda name, old: (name, data if name.endswith("data.pkl") else old))
        damaged(file, "damaged")
    # A value in itself, and one nested as deep as a pickle can be.
    for data in (b"\x80\x02]q\x01h\x01a.", b"\x80\x02N" + b"\x85" * 1_000_000 + b"."):
        rewritten(file, lambda name, old: (name, data if name.endswith("data.pkl") else old))
        refused(file, "no dict of tensors")
    rewritten(file, lambda name, old: (name, b"\x80\x02N" + b"N" * (16 << 20) if name.endswith("data.pkl") else old))
    refused(file, "at most 16777216 are read")


def test_an_incomplete_archive(tmp_path):
    file = tmp_path / "m.bin"
    torch.save({"a": torch.zeros(6)}, file)
    whole = file.read_bytes()
    for size in (*range(0, len(whole), 97), len(whole) - 1):
        file.write_bytes(whole[:size])
        damaged(file, "is not a complete zip archive")
    file.write_bytes(whole)
    rewritten(file, method=zipfile.ZIP_DEFLATED)
    refused(file, "compressed or encrypted")
    file.write_bytes(whole)
    rewritten(file, lambda name, data: (name, b"big" if name.endswith("byteorder") else data))
    refused(file, "not little-endian")
    file.write_bytes(whole)
    with pytest.warns(UserWarning, match="Duplicate name"):
        rewritten(file, more=[("m/data/0", b"other")])
    damaged(file, "is there twice")
    file.write_bytes(whole)
    rewritten(file, lambda name, data: (name.replace("data.pkl", "data.pickle"), data))
    refused(file, "not one that torch.save has written")
    # Sizes in the directory that reach beyond the entries.
    large = bytearray(whole)
    entry = large.rindex(b"PK\1\2", 0, large.rindex(b"m/data/0"))
    large[entry + 20 : entry + 28] = struct.pack("<II", 1 << 30, 1 << 30)
    file.write_bytes(large)
    damaged(file, "lies outside of it")
    torch.save({"a": torch.zeros(6)}, file, _use_new_zipfile_serialization=False)
    refused(file, "before 1.6")


def test_links_pipes_and_folders_are_no_files(tmp_path):
    torch.save({"a": torch.zeros(6)}, tmp_path / "there.bin")
    (tmp_path / "link.bin").symlink_to(tmp_path / "there.bin")
    refused(tmp_path / "link.bin", "a link is there")
    os.mkfifo(tmp_path / "pipe.bin")
    refused(tmp_path / "pipe.bin", "not a regular file")
    refused(tmp_path / "absent.bin", "No such file")
    (tmp_path / "pytorch_model.bin").mkdir()
    refused(tmp_path, "not a regular file")


def test_random_changes_are_refused_or_lie_in_the_file(tmp_path):
    file = tmp_path / "m.bin"
    torch.save({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0).half()[1:], "n": torch.tensor(7)}, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        data = archive.read("m/data.pkl")
    seed = random.Random(4)
    taken = 0
    for round in range(400):
        if round % 2:
            changed = bytearray(whole)
            for _ in range(seed.randrange(1, 4)):
                changed[seed.randrange(len(changed))] = seed.randrange(256)
            file.write_bytes(changed)
        else:
            at, length = seed.randrange(len(data)), seed.randrange(8)
            changed = data[:at] + seed.randbytes(seed.randrange(4)) + data[at + length :]
            file.write_bytes(whole)
            rewritten(file, lambda name, old: (name, changed if name.endswith("data.pkl") else old))
        found = answer(file)
        assert str(file) in found.get("error", str(file)), found
        if "error" not in found:
            taken += 1
            values_of(found)
    assert taken > 0


def small(folder, steps=3):
    """A universal checkpoint: a parameter of two elements with AdamW's states."""
    where = folder / "zero" / "w"
    where.mkdir(parents=True)
    for file in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"cat_dim": 0, "param": torch.tensor([1.0, 2.0])}, where / f"{file}.pt")
    torch.save(torch.tensor(float(steps)), where / "step.pt")


def save(value, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, file)


class DynamicLossScaler:
    """Like DeepSpeed's: its members are a dict."""

    def __init__(self, **members):
        self.__dict__.update(members)


def test_tied_names_buffers_and_frozen_parameters_are_distinguished(tmp_path):
    small(tmp_path)
    for name in ("head", "mask"):
        save({"param": torch.ones(2)}, tmp_path / "zero" / name / "fp32.pt")
    w = torch.tensor([1.0, 2.0])
    facts = {"module": OrderedDict(w=w, head=w, mask=w, frozen=torch.tensor([[3.0, 4.0]]), count=torch.tensor(1)), "buffer_names": ["mask"],
             "shared_params": {"head": "w"}, "args": argparse.Namespace(lr=1), "random": ("MT19937", torch.arange(3).numpy()),
             "global_steps": 5, "skipped_steps": 2}
    torch.save(facts, tmp_path / "mp_rank_00_model_states.pt")
    scaler = DynamicLossScaler(cur_scale=4096.0, cur_iter=5, last_overflow_iter=1, cur_hysteresis=2)
    torch.save({"loss_scaler": scaler}, tmp_path / "zero" / "optimizer_state.pt")
    found = answer(tmp_path)
    assert [(tensor["name"], tensor["state"]) for tensor in found["tensors"]] == [("w", ""), ("w", "exp_avg"), ("w", "exp_avg_sq"), ("frozen", "")]
    assert values_of(found)["frozen", ""] == bytes_of(facts["module"]["frozen"])
    assert [(out["name"], out["why"]) for out in found["left_out"]] == [
        ("head", "tied to w"), ("mask", "a buffer"), ("count", "no parameter with complete values")
    ]
    assert found["state"] == {"scale": 4096.0, "clean_steps": 3, "hysteresis_left": 2, "applied_steps": 3, "skipped_steps": 2}
    # Without a step of the parameter the model's count.
    (tmp_path / "zero/w/step.pt").unlink()
    assert answer(tmp_path)["state"]["applied_steps"] == 3


def test_stage_3_has_flat_tensors(tmp_path):
    small(tmp_path)
    for file in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save(torch.arange(6.0), tmp_path / "zero" / "w" / f"{file}.pt")
    (tmp_path / "zero/w/step.pt").unlink()
    torch.save({"optimizer_state_dict": {"state": {0: {"step": torch.tensor(4.0)}}}}, tmp_path / "zero/optimizer_state.pt")
    facts = {"param_shapes": [OrderedDict(w=torch.Size([2, 3]))], "frozen_param_shapes": {"f": torch.Size([2, 2]), "g": torch.Size([9])},
             "frozen_param_fragments": {"f": torch.arange(5.0), "g": torch.arange(5.0)}}
    torch.save(facts, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    found = answer(tmp_path)
    assert [(tensor["name"], tensor["shape"]) for tensor in found["tensors"]] == [("w", [2, 3])] * 3 + [("f", [2, 2])]
    assert found["left_out"] == [{"name": "g", "why": "no parameter with complete values"}]
    assert values_of(found)["f", ""] == bytes_of(torch.arange(4.0))
    assert found["state"]["applied_steps"] == 4
    # Of two ranks, each has a piece.
    torch.save(facts, tmp_path / "zero_pp_rank_1_mp_rank_00_model_states.pt")
    assert [out["why"] for out in answer(tmp_path)["left_out"]] == ["in pieces, in several *_model_states.pt"] * 2


def test_the_newest_one_is_found_by_its_name(tmp_path):
    small(tmp_path / "step3")
    latest = tmp_path / "latest_universal"
    latest.write_text("step3\n")
    assert answer(tmp_path)["path"] == str(tmp_path / "step3")
    for name in ("../step3", "", ".", "..", "/etc"):
        latest.write_text(name)
        damaged(tmp_path, "not the plain name")
    latest.write_text("step4")
    refused(tmp_path, "is not a folder")


def move_and_link(path, target):
    path.rename(target)
    path.symlink_to(target)


Flat = torch.tensor([1.0, 2.0])
WRONG = {
    "slices of tensor-parallel ranks": lambda zero: save({"param": Flat}, zero / "w/0/fp32.00"),
    "names torch_files_test.DynamicLossScaler": lambda zero: save({"param": Flat, "sub_param_shape": DynamicLossScaler()}, zero / "w/fp32.pt"),
    "lacks fp32.pt": lambda zero: (zero / "w/fp32.pt").unlink(),
    'neither a tensor nor a dict with "param"': lambda zero: save({}, zero / "w/fp32.pt"),
    "numbers of torch.float64": lambda zero: save(Flat.double(), zero / "w/exp_avg.pt"),
    "does not have its shape": lambda zero: save(Flat, zero / "w/fp32.pt"),
    "has the shape [3], its parameter [2]": lambda zero: save({"param": torch.ones(3)}, zero / "w/exp_avg.pt"),
    "has the shape [2], its parameter [3]": lambda zero: (
        save(Flat, zero / "w/fp32.pt"), save({"param_shapes": {"w": torch.Size([3])}}, zero.parent / "x_model_states.pt")),
    "shape that is not a list of sizes": lambda zero: save({"param_shapes": {"w": [-1]}}, zero.parent / "x_model_states.pt"),
    "says 4 steps, but another file says 3": lambda zero: (save({"param": Flat}, zero / "z/fp32.pt"), save(4, zero / "z/step.pt")),
    "which is not a count": lambda zero: save(1.5, zero / "w/step.pt"),
    "'step' of": lambda zero: save("3", zero / "w/step.pt"),
    "is not a single number": lambda zero: save(Flat, zero / "w/step.pt"),
    "but no number of steps": lambda zero: (zero / "w/step.pt").unlink(),
    "which is impossible": lambda zero: save({"skipped_steps": 10**16}, zero.parent / "x_model_states.pt"),
    "is neither a parameter's folder": lambda zero: (zero / "notes.txt").write_text("x"),
    "is not a file of a parameter": lambda zero: (zero / "w/inner").mkdir(),
    "a link is there": lambda zero: move_and_link(zero / "w/fp32.pt", zero.parent / "outside.pt"),
    "w' is neither a parameter's folder": lambda zero: move_and_link(zero / "w", zero.parent / "elsewhere"),
    "not followed": lambda zero: move_and_link(zero, zero.parent / "elsewhere"),
    "surrogates not allowed": lambda zero: (zero / "w").rename(zero / os.fsdecode(b"\xff")),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_in_a_universal_checkpoint_is_named(tmp_path, said):
    small(tmp_path)
    assert "error" not in answer(tmp_path)
    WRONG[said](tmp_path / "zero")
    found = answer(tmp_path)
    assert said in found["error"] and str(tmp_path) in found["error"], found
