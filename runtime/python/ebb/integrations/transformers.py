"""transformers' Trainer on the engine. A DeepSpeed JSON says what is sharded over the ranks, and what is in RAM or on a disk.

    from ebb.integrations.transformers import Trainer
    Trainer(model, TrainingArguments("out"), train_dataset=data, ebb_config="ds_config.json").train()

This file does what transformers leaves to accelerate's backends: wrapping, backward, clipping, the optimizer, saving and resuming. The loop,
its data, evaluation, schedules, callbacks and logs are transformers' own."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
from typing import Any, Mapping

import torch
import transformers
from accelerate.utils import recursively_apply
from torch import nn

from .._library import Error
from .._blocks import tensor_ranks_of
from .._making import initialize
from .._model import Config, config_text
from .._tensor_ranks import stated_ranks
from .._world import meet
from ..engine import Engine

_FOLDER = "engine"  # of a checkpoint of the Trainer's: the checkpoint of the engine
# DeepSpeed's schedules, and the values of TrainingArguments(lr_scheduler_type=) that mean the same.
_SCHEDULES = {"WarmupLR": ("constant_with_warmup", "constant"), "WarmupDecayLR": ("linear",), "WarmupCosineLR": ("cosine",)}
_OPTIMIZERS = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD"}  # TrainingArguments(optim=)


meet()


class Trainer(transformers.Trainer):
    """transformers.Trainer with three more arguments, by keyword:

    ebb_config: DeepSpeed's JSON, a path or a dict; default: stage 3. TrainingArguments give the values for "auto" and for missing keys: batch
        size, accumulation, clipping, bf16 and fp16, the optimizer and its parameters, the steps of a schedule. If TrainingArguments
        contradict a value, that is an error.
    ebb_options: more keywords of ebb.initialize: units, example, resident, groups, weights, values_of_rank_0, threads, check.

    tp_size: tensor ranks, which have the same samples; the JSON's "tensor_parallel.autotp_size" by another name. Default: those of the JSON, or of
        the model's DTensors. Samplers divide by data ranks.

    `trainer.engine` exists after training or evaluation has begun. The optimizer is the engine's, and so is the schedule if the JSON has a
    "scheduler"."""

    def __init__(self, *arguments: Any, ebb_config: Config | None = None, ebb_options: Mapping[str, Any] | None = None,
                 tp_size: int | None = None, **keywords: Any):
        self.engine: Engine | None = None
        self._stated = {"zero_optimization": {"stage": 3}} if ebb_config is None else read_config(ebb_config)
        self._options = dict(ebb_options or {})
        self._tensor_ranks = self._read_tensor_ranks(tp_size, keywords.get("model", arguments[0] if arguments else None))
        super().__init__(*arguments, **keywords)
        self._refuse()

    def _read_tensor_ranks(self, given: int | None, model: nn.Module | None) -> int:
        of_model = tensor_ranks_of(model) if model is not None else 1
        stated = stated_ranks(self._stated)
        if given is not None:
            if given < 1:
                raise Error(f"tp_size is {given}: it must be at least 1", "INVALID_ARGUMENT")
            stated["tp_size"] = given
        if of_model > 1:
            stated["the model's DTensors"] = of_model
        if len(set(stated.values())) > 1:
            raise Error(f"tensor ranks: {', '.join(f'{name} says {number}' for name, number in stated.items())}: they must agree", "INVALID_ARGUMENT")
        ranks = next(iter(stated.values()), 1)
        if ranks > 1:
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() % ranks != 0:
                raise Error(f"{ranks} tensor ranks do not divide {torch.distributed.get_world_size()} ranks", "INVALID_ARGUMENT")
            self._stated.setdefault("tensor_parallel", {})["autotp_size"] = ranks
        return ranks

    def get_tp_size(self) -> int:
        return self._tensor_ranks

    def _refuse(self) -> None:
        if self.optimizer is not None or self.lr_scheduler is not None or self.optimizer_cls_and_kwargs is not None:
            raise Error("optimizers=: the optimizer is the engine's. Name it in the JSON, or by TrainingArguments(optim=)", "INVALID_ARGUMENT")
        for name, instead in (
            ("fsdp", "the JSON says what is sharded"),
            ("torch_compile", "compile the blocks of the model, block.compile()"),
            ("auto_find_batch_size", "give per_device_train_batch_size"),
            ("fp16_full_eval", "the JSON says the dtype"), ("bf16_full_eval", "the JSON says the dtype"),
            ("sync_ref_model", "TRL's callback reads parameters between steps, when they have no value"),
        ):
            if getattr(self.args, name, None):
                raise Error(f"TrainingArguments({name}=) is not supported here: {instead}", "UNIMPLEMENTED")

    # What accelerate's backends do.

    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        made = {**super()._build_accelerator_args(**keywords), "mixed_precision": "no"}  # the JSON says the dtype: no autocast, no scaler
        made.pop("parallelism_config", None)  # of a model that was loaded with a tp_plan
        return made

    def create_accelerator_and_postprocess(self) -> None:
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1  # one process a device: no DataParallel
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = self._prepare_model
        self.accelerator.backward = lambda loss, **options: self.engine.backward(loss)
        self.accelerator.clip_grad_norm_ = lambda *arguments, **options: None  # at the update, by "gradient_clipping"
        if self._tensor_ranks > 1:
            self._divide_by_data_ranks()

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """No: transformers would take the norm of gradients that the engine has taken, as it does for DTensors beside plain parameters."""
        return False

    def _divide_by_data_ranks(self) -> None:
        """Tensor ranks get the same samples, and what is gathered for metrics has each data rank's once."""
        accelerator, ranks = self.accelerator, self._tensor_ranks
        if accelerator.num_processes % ranks != 0:
            raise Error(f"{ranks} tensor ranks do not divide {accelerator.num_processes} ranks", "INVALID_ARGUMENT")
        shape = (accelerator.num_processes // ranks, ranks)
        mesh = torch.distributed.device_mesh.init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_shard", "tp"))
        accelerator._prepare_device_mesh = lambda: mesh
        gather_for_metrics, gather = accelerator.gather_for_metrics, accelerator.gather

        def once(value: torch.Tensor) -> torch.Tensor:
            return value.unflatten(0, (shape[0], ranks, -1))[:, 0].flatten(0, 1)

        def for_metrics(values: Any, use_gather_object: bool = False) -> Any:
            if use_gather_object:
                raise Error("eval_use_gather_object is not supported with tensor ranks", "UNIMPLEMENTED")
            accelerator.gather = lambda inner: recursively_apply(once, gather(inner))
            try:
                return gather_for_metrics(values)
            finally:
                accelerator.gather = gather

        accelerator.gather_for_metrics = for_metrics
        self.gather_function = for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing, because the engine puts parameters where the JSON says."""
        for module in model.modules():
            module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None})

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def _prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        if model is not self.model:  # TRL's reference or reward model: whole on every rank, unless it has an engine of its own
            is_placed = "_ebb_engine" in model.__dict__ or self.accelerator.verify_device_map(model)
            return model if is_placed else model.to(self._device)
        self._shard()
        self.accelerator._models.append(model)
        return model

    @property
    def _device(self) -> str:
        return "cpu" if self.args.device.type == "cpu" else str(self.args.device)  # torch.distributed numbers CPUs

    def _shard(self) -> None:
        if self.engine is not None and self.engine.model is not self.model:  # model_init has made another
            self.engine.close()
            self.engine = None
        if self.engine is not None:
            return
        settings = filled(self._stated, self.args, self.state.max_steps or self.args.max_steps, self._tensor_ranks)
        options = dict(self._options)
        if "optimizer" not in self._stated and self.args.weight_decay != 0 and "groups" not in options:
            decayed = set(self.get_decay_parameter_names(self.model))
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad and name not in decayed]
            if names:
                options["groups"] = {"no_decay": f"^({'|'.join(map(re.escape, names))})$"}
                settings.setdefault("ebb", {}).setdefault("parameter_groups", {})["no_decay"] = {"weight_decay": 0.0}
        self.engine = initialize(self.model, settings, device=self._device, **options)
        self.engine.sums_micro_batches = True  # training_step() divides the loss
        if self.engine.optimizer is not None:
            # The loop decides when a step ends, also the shorter last step of an epoch.
            self.engine.optimizer._step = functools.partial(self.engine.step, now=True)

    def create_optimizer(self, *arguments: Any, **keywords: Any) -> torch.optim.Optimizer:
        self._shard()
        if self.engine.optimizer is None:
            raise Error("the model has no parameter that is trained", "INVALID_ARGUMENT")
        if self.optimizer is None:
            self.optimizer = self.engine.optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, *arguments: Any, **keywords: Any) -> Any:
        if "scheduler" not in self._stated:
            return super().create_scheduler(num_training_steps, *arguments, **keywords)
        if self.lr_scheduler is None:
            self.lr_scheduler = _ScheduleOfConfig(self.engine)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        if self.engine is not None and "loss" in logs:
            report = self.engine.report()
            logs.update(grad_norm=report.gradient_norm, learning_rate=report.learning_rate)
        super().log(logs, *arguments, **keywords)

    # Saving and resuming.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes files for from_pretrained(), piece by piece, so that no rank holds the model. For a peft model: the adapter."""
        if self.engine is None:
            return super().save_model(output_dir, _internal_call)
        folder = output_dir or self.args.output_dir
        self.engine.save_pretrained(folder, trainable_only=hasattr(self.model, "peft_config"))
        if self.args.should_save:
            described = self.processing_class if self.processing_class is not None else getattr(self.data_collator, "tokenizer", None)
            if described is not None:
                described.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # rates and the schedule; states are the engine's
        folder = os.path.join(output_dir, _FOLDER)
        if self.args.should_save:
            # A run that went on from an earlier step replaces this checkpoint, as transformers overwrites its own files.
            shutil.rmtree(folder, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.engine.save(folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and _has_engine(checkpoint):
            self.engine.load(os.path.join(checkpoint, _FOLDER))
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not _has_engine(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if not _has_engine(best):
            return super()._load_best_model()
        self.engine.load(os.path.join(best, _FOLDER))


def _has_engine(checkpoint: str) -> bool:
    return os.path.isdir(os.path.join(checkpoint, _FOLDER))


class _ScheduleOfConfig:
    """A schedule for the Trainer's loop, which steps it and asks it for the rate. The engine counts the steps of its own schedule."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def step(self) -> None:
        pass

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._engine.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def read_config(config: Config) -> dict[str, Any]:
    """The configuration as a dict, without the keys that are null, because those count as missing."""
    try:
        return json.loads(config_text(config), object_pairs_hook=_given)
    except json.JSONDecodeError as error:
        raise Error(f"ebb_config: {error}. Write plain JSON, without comments and trailing commas", "INVALID_ARGUMENT") from None


def _given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    for name in made:
        if sum(name == each for each, _ in pairs) > 1:
            raise Error(f"ebb_config: the key '{name}' is there twice in one object", "INVALID_ARGUMENT")
    return {name: value for name, value in made.items() if value is not None}


def filled(stated: Mapping[str, Any], args: transformers.TrainingArguments, steps: int, tensor_ranks: int = 1) -> dict[str, Any]:
    """The configuration, with values of `args` for "auto" and for missing keys. `steps`: of the whole run; 0 or less: not known.
    Raises if the two contradict each other, and names all such keys."""
    made = copy.deepcopy(dict(stated))
    made.setdefault("train_micro_batch_size_per_gpu", "auto")
    made.setdefault("gradient_accumulation_steps", "auto")
    made.setdefault("gradient_clipping", "auto")
    for kind in ("bf16", "fp16"):
        if getattr(args, kind):
            made.setdefault(kind, {"enabled": "auto"})
    if "optimizer" not in made:
        made["optimizer"] = _optimizer_of(args)
    contradictions = []
    values = _values(args, steps, tensor_ranks)
    for key, (value, argument) in values.items():
        *path, last = key.split(".")
        node = made
        for name in path:
            node = node.get(name, {})
        if node.get(last) == "auto":
            if value is None:
                raise Error(f"'{key}' is \"auto\", but the number of steps is not known before train(): give a number", "INVALID_ARGUMENT")
            node[last] = value
        elif last in node and argument is not None and value is not None and node[last] != value:
            contradictions.append(f"'{key}' is {node[last]}, but {argument} is {value}")
    if "scheduler" in made:
        contradictions += _other_schedule(made["scheduler"], args, values["scheduler.params.warmup_num_steps"][0])
    if contradictions:
        raise Error(
            "the JSON and TrainingArguments differ: " + "; ".join(contradictions) + '. Write "auto" in the JSON, or leave "scheduler" out of it to '
            "have the schedule of TrainingArguments", "INVALID_ARGUMENT"
        )
    return made


def _other_schedule(scheduler: Mapping[str, Any], args: transformers.TrainingArguments, warmup: int | None) -> list[str]:
    """What `args` ask of a schedule and `scheduler` does not do. A default, such as "linear", asks nothing."""
    kind, asked = scheduler.get("type"), getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    found = []
    if asked != type(args).lr_scheduler_type and asked not in _SCHEDULES.get(kind, ()):
        found.append(f"'scheduler.type' is {kind}, but lr_scheduler_type is {asked}")
    if args.lr_scheduler_kwargs:
        found.append(f"'scheduler' is there, but lr_scheduler_kwargs is {args.lr_scheduler_kwargs}")
    if warmup and "warmup_num_steps" not in scheduler.get("params", {}):
        found.append(f"'scheduler.params' of {kind} has no 'warmup_num_steps', but warmup_steps is {warmup}")
    return found


def _values(args: transformers.TrainingArguments, steps: int, tensor_ranks: int) -> dict[str, tuple[Any, str | None]]:
    """For each key the value of TrainingArguments, and the name of the argument if both must agree."""
    known = steps > 0
    each = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return {
        "train_micro_batch_size_per_gpu": (args.per_device_train_batch_size, "per_device_train_batch_size"),
        "gradient_accumulation_steps": (args.gradient_accumulation_steps, "gradient_accumulation_steps"),
        "train_batch_size": (each * args.world_size // tensor_ranks, "data ranks x accumulation x per_device_train_batch_size"),
        "gradient_clipping": (args.max_grad_norm, "max_grad_norm"),
        "optimizer.params.lr": (args.learning_rate, "learning_rate"),
        "optimizer.params.betas": ([args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2"),
        "optimizer.params.eps": (args.adam_epsilon, "adam_epsilon"),
        "optimizer.params.weight_decay": (args.weight_decay, "weight_decay"),
        "scheduler.params.warmup_min_lr": (0.0, None),
        "scheduler.params.warmup_max_lr": (args.learning_rate, "learning_rate"),
        "scheduler.params.warmup_num_steps": (args.get_warmup_steps(steps) if known else None, "warmup_steps"),
        "scheduler.params.total_num_steps": (steps if known else None, "max_steps"),
        "bf16.enabled": (args.bf16, "bf16"),
        "fp16.enabled": (args.fp16, "fp16"),
    }


def _optimizer_of(args: transformers.TrainingArguments) -> dict[str, Any]:
    kind = getattr(args.optim, "value", args.optim)
    if kind not in _OPTIMIZERS or args.optim_args:
        asked = f"optim='{kind}'" + (f", optim_args='{args.optim_args}'" if args.optim_args else "")
        raise Error(f"TrainingArguments({asked}): write the optimizer into the JSON, as \"optimizer\"", "UNIMPLEMENTED")
    parameters: dict[str, Any] = {"lr": "auto", "weight_decay": "auto"}
    if kind != "sgd":
        parameters.update(betas="auto", eps="auto")
    return {"type": _OPTIMIZERS[kind], "params": parameters}
