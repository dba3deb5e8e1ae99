"""DeepSpeedEngine and initialize(): DeepSpeed's calls of a training loop, over ebb.Engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .. import __version__, schedules
from .._fixed import engine_with
from .._library import Error
from .._making import initialize as shard
from .._reports import Report
from .._units import units_with
from .._world import meet
from ..engine import Engine
from . import VERSION, comm, optimizers, small_names, zero
from .config import DeepSpeedConfig, Facts, refuse_parallel
from .dataloader import DeepSpeedDataLoader
from .optimizers import DeepSpeedOptimizer, Groups
from .saving import Saving

log = logging.getLogger("ebb")
_NO_OPTIMIZER = "must provide optimizer during init in order to use"
_ADVICE = (". Through DeepSpeed's names: within deepspeed.zero.GatheredParameters(parameter), on every rank, it shows its value, and with "
           "modifier_rank=0 that rank's writes hold; deepspeed.utils.safe_get_full_fp32_param(parameter) reads the master")
_FORWARDS_MAX = 4  # before one backward, in the first step
_numbers = itertools.count()


def initialize(
    args: Any = None, model: nn.Module | None = None, optimizer: Any = None, model_parameters: Any = None, training_data: Any = None,
    lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None, dist_init_required: bool | None = None, collate_fn: Any = None,
    config: Any = None, mesh_param: Any = None, config_params: Any = None,
) -> tuple["DeepSpeedEngine", Any, Any, Any]:
    """The engine, its optimizer, the loader of `training_data` and the schedule."""
    assert model is not None, "deepspeed.initialize requires a model"
    refuse_parallel(mpu, mesh_param)
    comm.init_distributed(dist_init_required=dist_init_required, distributed_port=None)
    small_names.log_dist(f"DeepSpeed info: names of version {VERSION}, which Ebb {__version__} runs", ranks=[0])
    engine = DeepSpeedEngine(
        args=args, model=model, optimizer=optimizer, model_parameters=model_parameters, training_data=training_data, lr_scheduler=lr_scheduler,
        mpu=mpu, collate_fn=collate_fn, config=_config_of(args, config if config is not None else config_params),
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _config_of(args: Any, config: Any) -> Any:
    given = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if given is not None:
        assert config is None, "Not sure how to proceed: the arguments have a deepspeed_config, and initialize() has a config"
        return given
    assert config is not None, "DeepSpeed requires --deepspeed_config to specify configuration file"
    return config


class DeepSpeedEngine(Facts, Saving, nn.Module):
    """Around the client's model, `module`. `ebb` is the ebb.Engine that shards it; None: below stage 3 without an optimizer."""

    def __init__(
        self, args: Any = None, model: nn.Module | None = None, optimizer: Any = None, model_parameters: Any = None, training_data: Any = None,
        lr_scheduler: Any = None, mpu: Any = None, dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None,
        config_class: DeepSpeedConfig | None = None, mesh_device: Any = None, dont_change_device: bool = False,
    ):
        super().__init__()
        world = meet()
        self._config = config_class if config_class is not None else DeepSpeedConfig(config, mpu, mesh_device, world.size)
        self.config, self.mpu, self.collate_fn = self._config._param_dict, None, collate_fn
        self.global_rank, self.world_size, self.local_rank, self.dp_world_size = world.rank, world.size, world.local_rank, world.size
        self.global_steps = self.global_samples = self.micro_steps = 0
        self.data_parallel_group = self.seq_data_parallel_group = comm.get_world_group()
        self.device = torch.device("cuda", world.local_rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
        self.gather_16bit_weights_on_model_save = self._config.gathers_on_save
        self.ebb: Engine | None = None
        self.optimizer: DeepSpeedOptimizer | None = None
        self.lr_scheduler: Any = None
        self.inside_no_sync_ctxt = self._in_step = self._resumes_in_forward = False
        self._boundary: bool | None = None
        self._scaled_here = 0  # backwards of this step that divided the loss themselves
        self._has_forward_of_evaluation = False
        self._is_loaded = False  # from a checkpoint
        self._is_proven = False  # a forward with gradients has run, so the residents are known
        self._applied: bool | None = None
        self._norm, self._skipped = None, 0  # skipped steps: before the first update here
        self._reported: Report | None = None
        self._has_report = False  # an update here
        if isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
            assert isinstance(optimizer, torch.optim.Optimizer), (
                f"Client Optimizer (type = {type(optimizer)} is not instantiated but Client LR Scheduler is instantiated"
            )
        model = _whole(getattr(model, "_orig_mod", model))
        self.module = model
        zero.show(model)
        self._groups = self._grouped(optimizer, model_parameters)
        self._has_own_schedule = lr_scheduler is not None  # the JSON's does nothing
        for key, names in (self._config.leaf_module or {}).items():
            small_names.MARKS[key](model, [names] if isinstance(names, str) else names, raise_if_not_found=False)
        self._move_buffers()
        if self._groups is not None or self.zero_optimization_stage() == 3:
            self._shard(())
        else:
            for parameter in model.parameters():  # buffers keep their type
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self._config.dtype)
            model.to(self.device)
        if self._groups is not None:
            self.basic_optimizer = self._groups.optimizer
            self.optimizer = optimizers.CLASSES[self.zero_optimization_stage()](self.basic_optimizer, self)
            self.optimizer.loss_scale = self.ebb.next_loss_scale()
            self.lr_scheduler = self._scheduled(lr_scheduler)
        self.training_dataloader = self.deepspeed_io(training_data) if training_data is not None else None

    # What initialize() does.

    def _grouped(self, optimizer: Any, parameters: Any) -> Groups | None:
        stated = self._config.optimizer
        if optimizer is None and stated is None:
            if self.zero_optimization_stage() == 3:
                self.module.requires_grad_(False)
            return None
        if parameters is None:
            parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        else:
            parameters = list(parameters)
        if optimizer is None:
            optimizer = optimizers.of_config(stated, parameters)
        elif not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = optimizer(parameters)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        taken = {id(parameter) for parameter in optimizers.parameters_in(optimizer.param_groups)}
        left = [name for name, one in self.module.named_parameters() if one.requires_grad and id(one) not in taken]
        for name in left:
            self.module.get_parameter(name).requires_grad_(False)
        if left:
            log.warning("%d parameter(s) are in no group of the optimizer, so they are frozen: %s%s", len(left), left[0], ", ..." * (len(left) > 1))
        return Groups(optimizer, self.module)

    def _move_buffers(self) -> None:
        """With bf16 and fp16 they get the configured type, too, but not those that stay in fp32."""
        stays, computed = self._config.names_in_fp32(self.module), self._config.dtype != torch.float32
        for path, buffer in self.module.named_buffers():
            to = None
            if computed and buffer.is_floating_point() and stays and stays.search(path):
                to = torch.float32
            elif computed and buffer.dtype in (torch.float32, torch.bfloat16, torch.float16):
                to = self._config.buffer_dtype
            buffer.data = buffer.data.to(device=self.device, dtype=to)

    def _shard(self, resident: Iterable[str]) -> None:
        backwards = self.gradient_accumulation_steps() if self._config.managed else 1
        settings = self._config.for_engine(max(2, backwards))
        groups, own = None, self._groups.own if self._groups is not None else None
        if self._groups is not None and own is None:
            settings["optimizer"], of_groups = self._groups.settings()
            settings.setdefault("ebb", {})["parameter_groups"] = of_groups
            groups = self._groups.members
        if self._cycles_momentum():
            settings["scheduler"] = self._config.scheduler  # for the momentum: rates are those of lr_scheduler
            self._groups.not_fixed.add("betas")
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        external = [names[id(one)] for module in self.module.modules() for one in module.__dict__.get("_ebb_external", ()) if id(one) in names]
        leaves = small_names.get_z3_leaf_modules(self.module)
        self.ebb = shard(
            self.module, settings, units=units_with(self.module, leaves) if leaves else None, groups=groups, optimizer=own, resident=[re.escape(name) for name in {*external, *resident}], values_of_rank_0=True, dtype="config",
            device=str(self.device), name=f"engine{next(_numbers)}",
        )
        if self.zero_optimization_stage() == 3:
            for parameter in self.module.parameters():
                zero.mark(parameter)
            self.module.ds_external_parameters = tuple  # a call gives none: the engine finds them by itself
        self.ebb.shows_values, self.ebb._state.advice = True, _ADVICE
        if self._groups is not None:
            self.ebb.reads_gradients = True
            self.ebb.forwards_max = _FORWARDS_MAX
            self.ebb.open_steps(backwards, self._groups.rates, self._config.sums_ranks, self._scale)

    def _cycles_momentum(self) -> bool:
        scheduler = None if self._has_own_schedule else self._config.scheduler
        cycles = scheduler is not None and scheduler["type"] == "OneCycle" and (scheduler.get("params") or {}).get("cycle_momentum", True)
        return bool(cycles and self._groups is not None and "betas" in self._groups.optimizer.defaults)

    def _scheduled(self, given: Any) -> Any:
        if given is not None:
            return given(self.basic_optimizer) if callable(given) else given
        stated = self._config.scheduler
        return schedules.of_config(stated["type"], stated.get("params") or {}, self.basic_optimizer) if stated else None

    def deepspeed_io(
        self, dataset: Any, batch_size: int | None = None, route: str = "train", pin_memory: bool = True, data_sampler: Any = None,
        collate_fn: Any = None, num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Each rank's part of a data set, in micro-batches."""
        return DeepSpeedDataLoader(
            dataset, batch_size or self.train_micro_batch_size_per_gpu(), data_sampler, collate_fn or self.collate_fn, num_local_io_workers or 0,
            self.world_size, self.global_rank, is_train=route == "train", drop_last=self._config.dataloader_drop_last,
        )

    # A step.

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        autocast = contextlib.nullcontext()
        if self._config.autocast is not None:
            autocast = torch.autocast(self.device.type, self._config.autocast)
        if self.ebb is None:
            with autocast:
                return self.module(*inputs, **keywords)
        if self._resumes_in_forward:
            self.reload_states()
        trains = torch.is_grad_enabled() and self.optimizer is not None
        if torch.is_grad_enabled() and not trains and any(isinstance(one, torch.Tensor) and one.requires_grad for one in tree_leaves((inputs, keywords))):
            raise Error("an input needs a gradient, and an engine without an optimizer gives none: call it under torch.no_grad()", "UNIMPLEMENTED")
        if trains:
            self._prepare()
        with autocast, contextlib.nullcontext() if trains else torch.no_grad():
            output = self._known(trains, lambda: self.module(*inputs, **keywords))
        if trains:
            self._has_forward_of_evaluation = not self.module.training
        return output

    def _prepare(self) -> None:
        """Drops what no backward will come for."""
        ebb, failure = self.ebb, self.ebb.failure
        self._scaled_here = self._scaled_here if ebb.backwards else 0  # a step may have ended with an error
        if failure and ebb.backwards:
            raise Error(
                f"{failure}, after {ebb.backwards} backward(s) of the step, whose gradients are lost: call optimizer.zero_grad() to begin the "
                "step again"
            )
        if failure:
            log.warning("%s: that step is dropped, and training goes on", failure)
            self._scaled_here = 0
            ebb.drop()
        else:
            self._forget_evaluation()

    def _known(self, trains: bool, call: Callable[[], Any]) -> Any:
        """The forward. If the first one shows that parameters are used outside of their module, the engine is made again with these whole."""
        if not trains or self._is_proven:
            return call()
        try:
            output = call()
        except Error as error:
            outside = error.outside
            if not outside:
                raise
            if self.global_steps or self._is_loaded:
                raise Error(f"{error}. It was not so in the first batch, so call deepspeed.zero.register_external_parameter before initialize") from None
            log.info("%s: used outside of their module, so they are kept whole on every rank", ", ".join(outside))
            self.ebb.drop()
            self.ebb.close(keep_values=True)
            self._shard(outside)
            output = call()
        self._is_proven = True
        return output

    def _forget_evaluation(self) -> None:
        if self._has_forward_of_evaluation:
            self._has_forward_of_evaluation = False
            self.ebb.forget()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Returns the loss over gradient_accumulation_steps, which is what the gradients are of."""
        assert self.optimizer is not None, f"{_NO_OPTIMIZER} backward"
        assert isinstance(loss, torch.Tensor) and loss.numel() == 1, "loss must be a scalar tensor. Call backward() of an output that is none"
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self._has_forward_of_evaluation = False
        self.ebb.backward(loss)
        self._scaled_here += 1
        return loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """For loss.backward(): the loss times the loss scale."""
        assert self.optimizer is not None, f"{_NO_OPTIMIZER} scale"
        assert isinstance(loss, torch.Tensor) and loss.numel() == 1, "loss must be a scalar tensor"
        self._has_forward_of_evaluation = False
        return self.ebb.scaled(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Ends a micro-batch. At a boundary it updates the parameters, and steps lr_scheduler if the update was applied."""
        assert not self.inside_no_sync_ctxt, "It is illegal to call Engine.step() inside no_sync context manager"
        assert self.optimizer is not None, f"{_NO_OPTIMIZER} step"
        self._applied = False
        self._in_step = True
        try:
            if self.is_gradient_accumulation_boundary():
                self._update(lr_kwargs)
        finally:
            self._in_step = False
        self.micro_steps += 1

    def _scale(self) -> float:
        """Of the gradients, which loss.backward() has not divided by the accumulation."""
        if self._scaled_here not in (0, self.ebb.backwards):
            raise Error("some backwards of this step were engine.backward(loss), and others loss.backward(): use one of them in a step", "UNIMPLEMENTED")
        return 1.0 if self._scaled_here else 1.0 / self.gradient_accumulation_steps()

    def _update_alone(self) -> int:
        """Without counters and the schedule, as DeepSpeed's optimizer.step(). Returns the number of backwards before it."""
        if not self.is_gradient_accumulation_boundary() and not self._config.updates_anywhere:
            raise Error("optimizer.step() between the micro-batches of a step: call engine.step(), which updates at the last one. DeepSpeed has the "
                        "gradients here only at stage 3 without offload_optimizer", "UNIMPLEMENTED")
        backwards = self.ebb.backwards
        self.ebb.step(now=True)
        self._scaled_here, self._reported, self._has_report = 0, None, True
        self.basic_optimizer._opt_called = True  # torch's schedulers warn without it
        if self.fp16_enabled():
            self.optimizer.loss_scale = self.ebb.next_loss_scale()
        return backwards

    def _update(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        backwards = self._update_alone()
        self._applied = None  # report() knows
        # An error of one rank ends the step on all, so all wait for it before they count.
        applied = (self.lr_scheduler is not None or self._config.dtype != torch.float32 or self.world_size > 1) and self._report().applied
        self.global_steps += 1
        samples = self.train_batch_size()
        self.global_samples += samples if self._config.managed else samples // self.gradient_accumulation_steps() * backwards
        if applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def _report(self) -> Report | None:
        """Of the last update."""
        if self._reported is None and self._has_report:
            self._reported = self.ebb.report()
            if self._reported.applied:
                self._norm = self._reported.gradient_norm
        return self._reported

    def is_gradient_accumulation_boundary(self) -> bool:
        if self._boundary is not None:
            return self._boundary
        if not self._config.managed:
            return self._in_step
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        assert self._config.managed, "set_gradient_accumulation_boundary() is not supported with managed_gradient_accumulation=False"
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Removes `.grad`. What the engine has accumulated stays at stages 2 and 3. Below them DeepSpeed accumulates in `.grad`."""
        if self.zero_optimization_stage() < 2 and self.optimizer is not None:
            self._drop_gradients()
        elif self.ebb is not None:
            self.ebb.clear_gradients()
        else:
            self.module.zero_grad(set_to_none)

    def _zero_grad_of_optimizer(self) -> None:
        """At stage 2 DeepSpeed's keeps what is accumulated, and at stage 3 it does not."""
        if self.zero_optimization_stage() == 2 and not self.ebb.failure:
            self.ebb.clear_gradients()
        else:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._scaled_here = 0
        if self.ebb.failure:
            self.ebb.drop()
        elif self.ebb.backwards == 0:
            self.ebb.clear_gradients()
        elif self.ebb.is_between_forward_and_backward:
            raise Error("zero_grad() between a forward and its backward, after earlier backwards of the step: call it before the forward", "UNIMPLEMENTED")
        else:
            self.ebb.drop()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """No step within it. Gradients are accumulated as always."""
        stage = self.zero_optimization_stage()
        assert stage < 2, f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}"
        return self._without_step("no_sync context manager reentry is unsupported")

    def coalesce_grad_reduction(self) -> contextlib.AbstractContextManager[None]:
        """No step within it. Gradients are accumulated as always."""
        assert self._config.managed, "coalesce_grad_reduction is not supported with managed_gradient_accumulation=False"
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError("coalesce_grad_reduction requires ZeRO stage 1/2/3, got stage 0")
        return self._without_step("coalesce_grad_reduction cannot be nested inside another no_sync context")

    @contextlib.contextmanager
    def _without_step(self, of_second: str) -> Iterator[None]:
        assert not self.inside_no_sync_ctxt, of_second
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    # Numbers.

    def get_global_grad_norm(self) -> float | None:
        """Of the last applied step, before clipping."""
        self._report()
        return self._norm

    def was_step_applied(self) -> bool:
        report = self._report()
        return self._applied if self._applied is not None else bool(report and report.applied)

    @property
    def skipped_steps(self) -> int:
        report = self._report()
        return self._skipped if report is None else report.skipped_steps

    @property
    def cur_scale(self) -> float:
        """Of the next step."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    loss_scale = lambda self: self.cur_scale
    get_lr = lambda self: self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("momentum" if "momentum" in self.basic_optimizer.defaults else "betas")

    def _of_groups(self, key: str) -> list[Any]:
        return [group.get(key) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Between steps: another number of micro-batches in a step."""
        of_micro_batch = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size % of_micro_batch != 0:
            raise ValueError(f"Train batch size must be divisible by micro-batch data parallelism, which is {of_micro_batch}")
        accumulation = train_batch_size // of_micro_batch
        self._config.train_batch_size, self._config.gradient_accumulation_steps = train_batch_size, accumulation

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        self._config.train_batch_size = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self._config.train_micro_batch_size_per_gpu = micro_batch_size

    # The model.

    def compile(
        self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None, compiled_autograd_enabled: bool = False
    ) -> None:
        """Compiles the forward of each unit."""
        options = {**(compile_kwargs or {}), **({"backend": backend} if backend is not None else {})}
        for unit in self.ebb.units if self.ebb is not None else ():
            for module in unit.modules:
                module.forward = torch.compile(module.forward, **options)
        log.info("compile(): the forwards of units are compiled, each by itself")

    def offload_states(self, include: Any = None, device: Any = None, pin_memory: bool = True, non_blocking: bool = False) -> None:
        """Frees the device's memory until reload_states(), or, if `include` lacks "lp_params", until the next forward."""
        if self.ebb is not None and not self.ebb.is_suspended:
            self.ebb.suspend()
            self._resumes_in_forward = include is not None and "lp_params" not in include

    def empty_partition_cache(self) -> None:
        """Does nothing: gathered values are freed when their unit ends."""

    def reload_states(self, non_blocking: bool = False) -> None:
        self._resumes_in_forward = False
        if self.ebb is not None and self.ebb.is_suspended:
            self.ebb.resume()

    def destroy(self) -> None:
        if self.__dict__.get("ebb") is not None:
            self.ebb.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.destroy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(f"neither Ebb's DeepSpeedEngine nor {type(module).__name__} has an attribute '{name}'") from None


def _whole(model: nn.Module) -> nn.Module:
    """The model with its values. An engine that has it already ends here."""
    engine = engine_with(model)
    if engine is not None:
        engine.close(keep_values=True)
    return model
