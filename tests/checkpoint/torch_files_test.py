"""ebb-checkpoint imports files that torch itself writes: pytorch_model.bin, and folders in the layout of DeepSpeed's
ds_to_universal.py, for stages 1 and 2 and for stage 3. What is refused: tests/python/torch_files_test.py.

    torch_files_test.py EBB_CHECKPOINT
"""
import json
import os
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path

from program_under_test import peak_memory, require, run

require("torch", "ebb")
import ebb
import torch

STEPS = 3


def stored(runs):
    """The tensors of a checkpoint of one rank by class and parameter: bytes of fp32, by docs/format.md alone."""
    (path,) = runs.glob("step-*/rank-00000-of-00001.safetensors")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name.rpartition("@")[0]] = data[8 + length + begin:8 + length + end]
    return found


def bytes_of(tensor):
    return tensor.detach().float().contiguous().flatten().numpy().tobytes()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.up = torch.nn.Linear(8, 12)
        self.down = torch.nn.Linear(12, 8)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))

    def forward(self, x):
        return self.head(self.frozen(self.down(torch.relu(self.up(self.embedding(x))))))


def loss_of(model, step):
    x = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(step))
    return torch.nn.functional.cross_entropy(model(x).view(-1, 20), x.view(-1))


def train(model, optimizer, step):
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained():
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        train(model, optimizer, step)
    return model, optimizer


class Namespace:
    """Of the program that saved, as Megatron's arguments are."""

    def __init__(self):
        self.lr = 1e-2


def write_universal(folder, model, optimizer, stage3):
    shapes = OrderedDict()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shapes[name] = parameter.shape
        state = optimizer.state[parameter]
        where = folder / "zero" / name
        where.mkdir(parents=True)
        for file, tensor in (("fp32", parameter.detach()), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
            torch.save(tensor.flatten() if stage3 else {"cat_dim": 0, "param": tensor}, where / f"{file}.pt")
        if not stage3:
            torch.save(state["step"], where / "step.pt")
    module = model.state_dict()
    facts = {"module": module, "buffer_names": ["mask"], "param_shapes": [shapes], "frozen_param_shapes": None,
             "frozen_param_fragments": None, "shared_params": {"head.weight": "embedding.weight"}, "global_steps": STEPS,
             "skipped_steps": 0, "args": Namespace(), "random": torch.get_rng_state(), "ds_version": "0.19.8"}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if stage3:
        facts["module"] = OrderedDict((name, value.new_empty(0)) for name, value in module.items())
        facts["frozen_param_shapes"] = OrderedDict((name, p.shape) for name, p in frozen.items())
        facts["frozen_param_fragments"] = OrderedDict((name, p.detach().flatten()) for name, p in frozen.items())
        torch.save({"optimizer_state_dict": {"state": {0: {"step": torch.tensor(float(STEPS))}}, "param_groups": []}},
                   folder / "zero" / "optimizer_state.pt")
    else:
        # Parameters without optimizer state, as newer versions of ds_to_universal.py write them.
        for name, value in module.items():
            if not (folder / "zero" / name).exists():
                (folder / "zero" / name).mkdir()
                torch.save({"param": value.float()}, folder / "zero" / name / "fp32.pt")
    torch.save(facts, folder / ("zero_pp_rank_0_mp_rank_00_model_states.pt" if stage3 else "mp_rank_00_model_states.pt"))


with tempfile.TemporaryDirectory() as made:
    folder = Path(made)
    model, optimizer = trained()
    expected = {}
    for name, parameter in model.named_parameters():
        expected[f"master/{name}"] = bytes_of(parameter)
        for state in ("exp_avg", "exp_avg_sq") if parameter.requires_grad else ():
            expected[f"{state}/{name}"] = bytes_of(optimizer.state[parameter][state])

    for stage3 in (False, True):
        universal, runs = folder / f"universal-{stage3}", folder / f"runs-{stage3}"
        write_universal(universal, model, optimizer, stage3)
        said = run("import", universal, runs)
        if not stage3:
            assert "left out: mask, which is a buffer" in said and "left out: head.weight, which is tied" in said, said
        assert stored(runs) == expected
        assert f"step {STEPS}: {STEPS} applied, 0 skipped" in run("inspect", runs)
    run("diff", folder / "runs-False", folder / "runs-True")

    # A folder that is named, and one that was not converted.
    (folder / "latest_universal").write_text("universal-False")
    run("diff", folder, folder / "runs-False")
    plain = folder / "plain"
    plain.mkdir()
    torch.save({}, plain / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert "ds_to_universal.py" in run("import", plain, folder / "none", code=2)

    # Files of torch.save alone.
    single = folder / "pytorch_model.bin"
    torch.save(model.state_dict(), single)
    run("import", single, folder / "single")
    assert stored(folder / "single")["master/up.weight"] == bytes_of(model.up.weight)

    # The run goes on as torch's does.
    copied = Model()
    config = {"train_batch_size": 2, "gradient_clipping": 0, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}}
    engine = ebb.initialize(copied, config)
    engine.load(folder / "runs-True")
    for step in range(STEPS, STEPS + 2):
        train(model, optimizer, step)
        engine.backward(loss_of(copied, step))
        engine.step()
    values = engine.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach(), rtol=0, atol=1e-6)
    engine.close()

    # Damage in one file: nothing is written, and no traceback printed. A module of the current folder is not imported.
    weight = folder / "universal-False" / "zero" / "up.weight" / "fp32.pt"
    whole = weight.read_bytes()
    (folder / "torch.py").write_text(f"open({str(folder / 'executed')!r}, 'w')")
    os.chdir(folder)
    run("inspect", single)
    for damage in (whole[:-100], whole.replace(b"K\x0cK\x08", b"K\x0dK\x08")):
        weight.write_bytes(damage)
        said = run("import", folder / "universal-False", folder / "damaged", code=1)
        assert str(weight) in said and "Traceback" not in said and said.count("\n") == 1, said
        assert not (folder / "damaged").exists()
    weight.unlink()
    assert "lacks fp32.pt" in run("import", folder / "universal-False", folder / "damaged", code=2)
    assert not (folder / "executed").exists()

    # Neither program holds a file, or a part of it that depends on its size.
    large = folder / "large.bin"
    needed = peak_memory("inspect", single)
    with torch.serialization.skip_data():
        torch.save({"w": torch.empty(needed // 4096 + (256 << 8), 1024)}, large)
    assert large.stat().st_size >= needed + (256 << 20)
    assert peak_memory("inspect", large) < needed + (96 << 20), needed
print("imported and compared")
