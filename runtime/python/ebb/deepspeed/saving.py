"""save_checkpoint and load_checkpoint: DIR/TAG has a checkpoint of Ebb's, and DIR/latest the newest tag. And whole values of the model."""

from __future__ import annotations

import glob
import io
import logging
import os
import pathlib
import shutil
from typing import Any, Callable, Mapping

import torch

from .. import checkpoint
from .._library import Error
from ..saving import replace_text
from . import comm
from .zero_to_fp32 import OF_MODEL, SCRIPT, is_ours, tag_in, write_for_others

log = logging.getLogger("ebb")
_COUNTERS = ("global_steps", "global_samples", "micro_steps")


class Saving:
    """Is a part of DeepSpeedEngine."""

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: Mapping[str, Any] | None = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Collective, between steps: replaces `save_dir`/`tag`, by default global_stepN. `client_state` is that of rank 0."""
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        folder = os.path.join(save_dir, tag)
        self._forget_evaluation()
        if self.global_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder)
        comm.barrier()
        schedule, groups = self.lr_scheduler, self.optimizer.state_dict()["param_groups"] if self.optimizer is not None else []
        kept = {
            "client_state": dict(client_state or {}), "groups": groups, "lr_scheduler": schedule.state_dict() if hasattr(schedule, "state_dict") else None,
            **{name: getattr(self, name) for name in _COUNTERS}, "skipped_steps": self.skipped_steps, "names": self.ebb.names_of_entries() if self.ebb is not None else {},
        }
        written = io.BytesIO()
        torch.save(kept, written)
        if self.ebb is not None:
            self.ebb.save(folder, trainer=written.getvalue())
        elif self.global_rank == 0:
            torch.save({"module": self.module.state_dict(), "kept": written.getvalue()}, os.path.join(folder, OF_MODEL))
        if self.global_rank == 0:
            write_for_others(folder, kept["client_state"], self.zero_optimization_stage(), self._config.dtype == torch.bfloat16)
            pathlib.Path(save_dir, "zero_to_fp32.py").write_text(SCRIPT, encoding="utf-8")
            if save_latest:
                replace_text(pathlib.Path(save_dir, "latest"), tag)
        comm.barrier()
        return True

    def load_checkpoint(
        self, load_dir: str, tag: Any = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Collective, between steps: the folder and the client state, or (None, None) and a warning if there is no checkpoint. Any number of ranks,
        any stage and any tier loads it. Universal checkpoints of DeepSpeed's are imported. The files were written by torch.save, so load only
        what you trust."""
        folder, is_universal = self._folder_of(load_dir, tag)
        if folder is None:
            return None, None
        if custom_load_fn is not None:
            raise Error("load_checkpoint with custom_load_fn is not built yet: call load_module_state_dict", "UNIMPLEMENTED")
        keeps_states = load_optimizer_states and not load_module_only
        self._forget_evaluation()
        if is_universal:
            kept = self._load_universal(folder, keeps_states, load_module_strict)
        elif self.ebb is not None:
            text = self.ebb.load(folder, states=keeps_states, partial=not load_module_strict)[1]
            kept = torch.load(io.BytesIO(text), map_location="cpu", weights_only=False)
        else:
            read = torch.load(os.path.join(folder, OF_MODEL), map_location=self.device, weights_only=False)
            self.module.load_state_dict(read["module"], strict=load_module_strict)
            kept = torch.load(io.BytesIO(read["kept"]), map_location="cpu", weights_only=False)
        self._is_loaded = True
        if load_module_only:
            return folder, kept["client_state"]
        for name in _COUNTERS:
            setattr(self, name, kept[name])
        self._reported, self._applied, self._has_report, self._skipped = None, None, False, kept.get("skipped_steps", 0)
        if keeps_states and self.optimizer is not None:
            if kept["groups"]:
                self.optimizer.load_state_dict({"param_groups": kept["groups"]})
            self.optimizer.loss_scale = self.ebb.next_loss_scale()
        if load_lr_scheduler_states and self.lr_scheduler is not None and kept["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        return folder, kept["client_state"]

    def _folder_of(self, load_dir: str, tag: Any) -> tuple[str | None, bool]:
        """The folder, and whether it is a universal checkpoint of DeepSpeed's."""
        if tag is None and self._config.loads_universal:
            tag = tag_in(os.path.join(load_dir, "latest_universal"))
        if tag is None:
            tag = tag_in(os.path.join(load_dir, "latest"))
        if tag is None:
            log.warning("Unable to find latest file at %s/latest, if trying to load latest checkpoint please ensure this file exists", load_dir)
            return None, False
        folder = os.path.join(load_dir, str(tag))
        for universal in (folder, f"{folder}_universal"):
            if os.path.isdir(os.path.join(universal, "zero")):
                return universal, True
        if not is_ours(folder) and glob.glob(os.path.join(glob.escape(folder), "*_model_states.pt")):
            raise Error(
                f"'{folder}' is a checkpoint of DeepSpeed's, in pieces of its ranks. Where DeepSpeed is installed, run `python -m "
                f"deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder {folder}_universal`. Then load '{load_dir}' again",
                "UNIMPLEMENTED"
            )
        if not os.path.isdir(folder):
            log.warning("Can't find a valid checkpoint at %s", folder)
            return None, False
        return folder, False

    def _load_universal(self, folder: str, keeps_states: bool, is_strict: bool) -> dict[str, Any]:
        if self.ebb is None:
            raise Error(f"'{folder}' is a universal checkpoint, and this engine has no shards: initialize it with an optimizer", "UNIMPLEMENTED")
        self.ebb.load(folder, states=keeps_states, partial=not is_strict)
        facts = checkpoint.facts_of_universal(folder)
        return {"micro_steps": facts["global_steps"] * self.gradient_accumulation_steps(), **facts}

    # Whole values.

    def module_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False, exclude_frozen_parameters: bool = False) -> Any:
        """Collective: whole values on the CPU of every rank."""
        values = self.module.state_dict()
        return self._without_frozen(values) if exclude_frozen_parameters else values

    def _without_frozen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        frozen = {name for name, parameter in self.module.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in values.items() if name not in frozen}

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None, fetch_z3_params: bool = False) -> None:
        values = checkpoint.get("module", checkpoint)
        if custom_load_fn is not None:
            custom_load_fn(src=values, dst=self.module)
        else:
            self.module.load_state_dict(values, strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Collective: whole values on the CPU of rank 0, None elsewhere."""
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode")
        values = self.ebb.state_dict(rank=0)
        if self.global_rank != 0:
            return None
        return self._without_frozen(values) if exclude_frozen_parameters else values

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False) -> bool:
        """Collective: rank 0 writes the values. At stage 3 only with stage3_gather_16bit_weights_on_model_save; else it returns False."""
        if self.zero_optimization_partition_weights():
            if not self.gather_16bit_weights_on_model_save:
                return False
            values = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        else:
            values = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self.global_rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save({name: value.clone() for name, value in values.items()}, os.path.join(save_dir, save_filename))
        comm.barrier()
        return True

    save_fp16_model = save_16bit_model
