"""Every example runs, as its first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def run(ranks, name, *arguments):
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, str(EXAMPLES / name), *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_loop_has_the_losses_of_torch(tmp_path):
    lines = [line.split() for line in run(2, "loop.py", "--steps", 5, "--nvme", tmp_path, "--beside-torch").splitlines() if "torch" in line]
    assert lines
    for line in lines:
        assert abs(float(line[line.index("loss") + 1]) - float(line[line.index("torch") + 1])) < 1e-5


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_ranks_have_the_losses_and_parameters_of_torch(tmp_path, tensor):
    said = run(4, "tensor.py", "--tensor", tensor, "--steps", 5, "--beside-torch", "--save", tmp_path).splitlines()
    assert said[0] == f"4 ranks: {4 // tensor} data x {tensor} tensor"
    lines = [line.split() for line in said if line.startswith("step")]
    assert lines
    for line in lines:
        assert abs(float(line[line.index("loss") + 1]) - float(line[line.index("torch") + 1])) < 1e-5
    assert float(said[-1].split()[-4]) < 1e-3, said[-1]
    assert (tmp_path / "model.safetensors").exists()


def test_lora_saves_its_adapter(tmp_path):
    run(2, "lora.py", "--steps", 2, "--save", tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trainer_goes_on_from_its_checkpoint(tmp_path, ranks):
    said = run(ranks, "trainer.py", tmp_path, "--steps", 10)
    assert "eval_loss" in said and "text:" in said
    run(ranks, "trainer.py", tmp_path, "--steps", 12, "--resume")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-12"]
