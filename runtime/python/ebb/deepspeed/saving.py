"""save_checkpoint and load_checkpoint: DIR/TAG has a checkpoint of Ebb's, and DIR/latest the newest tag."""

from __future__ import annotations

import glob
import io
import logging
import os
import shutil
from typing import Any, Callable, Mapping

import torch

from .._library import Error
from . import comm

log = logging.getLogger("ebb")
_COUNTERS = ("global_steps", "global_samples", "micro_steps")
_OF_MODEL = "model.pt"  # of an engine without shards


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
            **{name: getattr(self, name) for name in _COUNTERS},
        }
        written = io.BytesIO()
        torch.save(kept, written)
        if self.ebb is not None:
            self.ebb.save(folder, trainer=written.getvalue())
        elif self.global_rank == 0:
            torch.save({"module": self.module.state_dict(), "kept": written.getvalue()}, os.path.join(folder, _OF_MODEL))
        if self.global_rank == 0 and save_latest:
            part = os.path.join(save_dir, ".latest.part")
            with open(part, "w", encoding="utf-8") as file:
                file.write(tag)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, os.path.join(save_dir, "latest"))
        comm.barrier()
        return True

    def load_checkpoint(
        self, load_dir: str, tag: Any = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Collective, between steps: the folder and the client state, or (None, None) and a warning if there is no checkpoint. Any number of ranks,
        any stage and any tier loads it. The file was written by torch.save, so load only what you trust."""
        folder = self._folder_of(load_dir, tag)
        if folder is None:
            return None, None
        if custom_load_fn is not None or not load_module_strict:
            raise Error("load_checkpoint with custom_load_fn, or with load_module_strict=False, is not built yet", "UNIMPLEMENTED")
        keeps_states = load_optimizer_states and not load_module_only
        if not keeps_states and self.global_steps:
            raise Error("load_checkpoint without optimizer states after the first step is not built yet: load before it", "UNIMPLEMENTED")
        self._forget_evaluation()
        if self.ebb is not None:
            text = self.ebb.load(folder)[1]
            if not keeps_states and self.optimizer is not None:
                self._shard_again(())  # with the values, and states as at the beginning
        else:
            read = torch.load(os.path.join(folder, _OF_MODEL), map_location=self.device)
            self.module.load_state_dict(read["module"])
            text = read["kept"]
        kept = torch.load(io.BytesIO(text), map_location="cpu", weights_only=False)
        self._is_loaded = True
        if load_module_only:
            return folder, kept["client_state"]
        for name in _COUNTERS:
            setattr(self, name, kept[name])
        self._reported = self._applied = None
        if keeps_states and self.optimizer is not None:
            self.optimizer.load_state_dict({"param_groups": kept["groups"]})
            self.optimizer.loss_scale = self.ebb.next_loss_scale()
        if load_lr_scheduler_states and self.lr_scheduler is not None and kept["lr_scheduler"] is not None:
            self.lr_scheduler.load_state_dict(kept["lr_scheduler"])
        return folder, kept["client_state"]

    def _folder_of(self, load_dir: str, tag: Any) -> str | None:
        if tag is None:
            latest = os.path.join(load_dir, "latest")
            if not os.path.isfile(latest):
                log.warning("Unable to find latest file at %s, if trying to load latest checkpoint please ensure this file exists", latest)
                return None
            with open(latest, encoding="utf-8") as file:
                tag = file.read().strip()
        folder = os.path.join(load_dir, str(tag))
        if glob.glob(os.path.join(glob.escape(folder), "*_model_states.pt")):
            raise Error(
                f"'{folder}' is a checkpoint of DeepSpeed's, which is not read here yet: run `python -m deepspeed.checkpoint.ds_to_universal` of DeepSpeed "
                "over it, and `ebb-checkpoint` over what that writes", "UNIMPLEMENTED"
            )
        if not os.path.isdir(folder):
            log.warning("Can't find a valid checkpoint at %s", folder)
            return None
        return folder
