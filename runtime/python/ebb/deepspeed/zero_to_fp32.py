"""deepspeed.utils.zero_to_fp32: the fp32 values of a tag that save_checkpoint() has written, without an engine."""

import argparse
import glob
import io
import os
from typing import Any

import torch
from torch import nn

from .._library import Error
from .._saved_run import SavedRun, write_model_files

# DeepSpeed's names, which programs look for. Behind them are the client state and the stage of ZeRO alone.
_OPTIMIZER_STATES = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
OF_MODEL = "model.pt"  # of an engine without shards
SCRIPT = '''"""Writes the fp32 values of a tag in this folder for from_pretrained: python zero_to_fp32.py . output"""

from ebb.deepspeed.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''


def tag_in(path: str) -> str | None:
    """Of the file `latest` or another; None if there is none."""
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def _folder(checkpoint_dir: Any, tag: Any) -> str:
    if tag is None:
        latest = os.path.join(checkpoint_dir, "latest")
        tag = tag_in(latest)
        if tag is None:
            raise ValueError(f"Unable to find 'latest' file at {latest}")
    folder = os.path.join(checkpoint_dir, str(tag))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Any, tag: Any = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """The model's state_dict() in fp32. `lazy_mode`: changes nothing."""
    folder = _folder(checkpoint_dir, tag)
    if os.path.exists(os.path.join(folder, OF_MODEL)):
        values = torch.load(os.path.join(folder, OF_MODEL), map_location="cpu", weights_only=False)["module"]
        return {name: value.float() if value.is_floating_point() else value for name, value in values.items()}
    run = SavedRun(folder)
    names = torch.load(io.BytesIO(run.trainer), map_location="cpu", weights_only=False)["names"]
    read: dict[str, torch.Tensor] = {}  # a tied parameter has several names
    values = dict(run.buffers)
    for key, name in names.items():
        if run.parameters[name]["trainable"] or not exclude_frozen_parameters:
            value = read[name] if name in read else run[name]
            read[name] = values[key] = value if value.dtype == torch.uint8 else value.float()
    return values


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Any, tag: Any = None) -> nn.Module:
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Any, output_dir: Any, max_shard_size: Any = "5GB", safe_serialization: bool = False, tag: Any = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    write_model_files(values, output_dir, max_shard_size, safe_serialization)


def write_for_others(folder: str, client_state: Any, stage: int, is_bf16: bool) -> None:
    """Two files that nothing here loads."""
    torch.save(client_state, os.path.join(folder, _model_states(stage)))
    torch.save({"optimizer_state_dict": {"zero_stage": stage}}, os.path.join(folder, "bf16_" * is_bf16 + _OPTIMIZER_STATES))


def _model_states(stage: int) -> str:
    return "zero_pp_rank_0_" * (stage == 3) + "mp_rank_00_model_states.pt"


def get_model_state_file(checkpoint_dir: Any, zero_stage: int) -> str:
    """Of a tag's folder: the file with the client state."""
    return _existing(checkpoint_dir, _model_states(zero_stage))[0]


def get_optim_files(checkpoint_dir: Any) -> list[str]:
    """Of a tag's folder: the file with the stage of ZeRO."""
    return _existing(checkpoint_dir, "*" + _OPTIMIZER_STATES)


def _existing(folder: Any, name: str) -> list[str]:
    found = glob.glob(os.path.join(glob.escape(str(folder)), name))
    if not found:
        raise FileNotFoundError(f"can't find '{name}' in '{folder}'")
    return found


def is_ours(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, OF_MODEL)) or bool(glob.glob(os.path.join(glob.escape(folder), "step-*")))


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the fp32 values of a checkpoint for from_pretrained.")
    parser.add_argument("checkpoint_dir", help="the folder with the file `latest`")
    parser.add_argument("output_dir")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors files")
    parser.add_argument("-t", "--tag", default=None)
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="does nothing")
    given = parser.parse_args()
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            given.checkpoint_dir, given.output_dir, given.max_shard_size, given.safe_serialization, given.tag, given.exclude_frozen_parameters
        )
    except (Error, OSError, ValueError) as error:
        raise SystemExit(f"zero_to_fp32.py: {error}") from None
