"""The names below `deepspeed`: one table, of which the package, `python -m ebb.deepspeed --check` and the table in docs/deepspeed.md are made.

A name that is not in it raises an error by that name. A refused name can be imported, and raises ebb.Error when it is called."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, Iterator, NamedTuple

from .. import __version__ as __ebb__
from .._library import Error
from . import VERSION


class Row(NamedTuple):
    """`modules` and `names` are lists with blanks; "." is deepspeed itself. `source`: the module of ebb.deepspeed that has the names, or
    "value": `note` is the value, "nothing": calls do nothing, "refused": calls raise."""

    modules: str
    names: str
    source: str
    note: Any


TABLE = (
    Row(". runtime.engine", "initialize", "engine", "`ebb.initialize`; returns engine, optimizer, loader and schedule"),
    Row(". runtime.engine", "DeepSpeedEngine", "engine", "an `nn.Module` around the model; `engine.ebb` is the `ebb.Engine`"),
    Row(". runtime.config", "DeepSpeedConfig DeepSpeedConfigError", "config", "the JSON's keys by their names"),
    Row(".", "add_config_arguments", "config", "`--deepspeed`, `--deepspeed_config`"),
    Row(". comm comm.comm utils.distributed", "init_distributed", "comm", "connects Ebb's ranks, then torch.distributed's"),
    Row("comm comm.comm", "*", "comm", "`torch.distributed`"),
    Row(". accelerator accelerator.real_accelerator", "get_accelerator", "accelerator", "`torch.cuda`, or the CPU"),
    Row(". runtime.base_optimizer runtime.zero.base_optimizer", "DeepSpeedOptimizer ZeROOptimizer", "optimizers",
        "`engine.optimizer`: the client's groups, as the same dicts"),
    Row("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "optimizers", "`engine.optimizer` at stage 3, its `parameter_offload` and, to read, `fp32_partitioned_groups_flat`"),
    Row("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "optimizers", "`engine.optimizer` at stages 1 and 2, and, to read, `single_partition_of_fp32_groups`"),
    Row("runtime.zero.offload_config", "OffloadDeviceEnum OffloadStateTypeEnum", "zero", "names for `engine.offload_states`"),
    Row("runtime.zero runtime.zero.stage3", "unwrap_model_for_generation", "zero", "whole values, which forwards read without the engine"),
    Row(". runtime.dataloader", "DeepSpeedDataLoader", "dataloader", "each rank's micro-batches"),
    Row("utils runtime.dataloader runtime.utils", "RepeatingLoader", "dataloader", "begins again at its end"),
    Row("ops.adam ops.adam.fused_adam", "FusedAdam", "optimizers", "Ebb's AdamW, or Adam with `adam_w_mode=False`"),
    Row("ops.adam ops.adam.cpu_adam", "DeepSpeedCPUAdam", "optimizers", "the same, on every tier"),
    Row("ops.lion ops.lion.cpu_lion ops.lion.fused_lion", "FusedLion DeepSpeedCPULion", "optimizers", "Ebb's Lion"),
    Row("ops.adagrad ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad", "optimizers", "Ebb's Adagrad"),
    Row("ops.lamb ops.lamb.fused_lamb", "FusedLamb", "optimizers", "Ebb's Lamb"),
    Row("runtime.lr_schedules", "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR VALID_LR_SCHEDULES", "ebb.schedules",
        "DeepSpeed's rates to 1e-12; `warmup_num_steps` 0 counts as 2"),
    Row("zero runtime.zero runtime.zero.partition_parameters", "Init MiCS_Init", "zero",
        "a host has one copy of the model, in RAM or in `nvme_path`"),
    Row("zero runtime.zero runtime.zero.partition_parameters", "GatheredParameters", "zero",
        "whole values, also below stage 3; with `modifier_rank` that rank's changes are written"),
    Row("zero runtime.zero runtime.zero.partition_parameters", "register_external_parameter unregister_external_parameter", "zero",
        "before `initialize`: the parameter is kept whole"),
    Row("zero runtime.zero runtime.zero.partition_parameters", "ZeroParamStatus ZeroParamType is_zero_param", "zero", "of parameters made in `zero.Init`"),
    Row("runtime.zero.partition_parameters", "zero_wrapper_for_fp_tensor_constructor", "zero", "changes nothing"),
    Row("utils utils.tensor_fragment", "safe_get_full_fp32_param safe_set_full_fp32_param", "state", "the whole fp32 master"),
    Row("utils utils.tensor_fragment", "safe_get_full_optimizer_state safe_set_full_optimizer_state", "state", "a state such as \"exp_avg\""),
    Row("utils utils.tensor_fragment", "safe_get_full_grad safe_set_full_grad safe_update_full_grad_vectorized", "state",
        "the gradient of the step, between its last backward and `step()`"),
    Row("utils utils.tensor_fragment", "safe_get_local_fp32_param safe_set_local_fp32_param safe_get_local_grad safe_set_local_grad "
        "safe_get_local_optimizer_state safe_set_local_optimizer_state", "state", "DeepSpeed's part of this rank; collective here"),
    Row("utils", "set_z3_leaf_modules set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix unset_z3_leaf_modules get_z3_leaf_modules "
        "z3_leaf_module set_z3_leaf_module", "small_names", "what is in a marked module is gathered together"),
    Row("utils utils.logging", "logger log_dist warning_once", "small_names", "a logger of Python's"),
    Row("utils utils.init_on_device", "OnDevice", "small_names", "on \"meta\": `ebb.empty_parameters()`"),
    Row("utils utils.nvtx", "instrument_w_nvtx", "small_names", "the function itself"),
    Row("utils compression.helper", "recursive_getattr recursive_setattr", "small_names", "attributes by a path"),
    Row("runtime.utils", "see_memory_usage move_to_device", "small_names", "nothing; moves tensors"),
    Row("runtime.utils", "set_random_seed", "accelerator", "of Python, numpy and torch"),
    Row("utils.groups", "*", "comm", "groups of a world in which every rank is data-parallel"),
    Row("checkpointing runtime.activation_checkpointing.checkpointing", "checkpoint non_reentrant_checkpoint configure is_configured reset", "small_names",
        "`torch.utils.checkpoint`, not reentrant"),
    Row("checkpointing runtime.activation_checkpointing.checkpointing", "get_cuda_rng_tracker model_parallel_cuda_manual_seed", "refused",
        "they are for tensor parallelism, and every rank is data-parallel"),
    Row("checkpoint.utils", "clone_tensors_for_torch_save", "small_names", "copies of tensors"),
    Row("runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine", "small_names", "an empty class"),
    Row("utils.zero_to_fp32", "convert_zero_checkpoint_to_fp32_state_dict get_fp32_state_dict_from_zero_checkpoint "
        "load_state_dict_from_zero_checkpoint get_model_state_file get_optim_files main", "zero_to_fp32", "a checkpoint without an engine"),
    Row("ops.op_builder ops.op_builder.all_ops ops.aio", "OpBuilder CPUAdamBuilder FusedAdamBuilder CPULionBuilder FusedLionBuilder CPUAdagradBuilder "
        "FusedLambBuilder AsyncIOBuilder UtilsBuilder TransformerBuilder", "small_names", "compatible; `load()` raises"),
    Row("ops", "__compatible_ops__", "value", dict.fromkeys(
        ("cpu_adam", "fused_adam", "cpu_lion", "fused_lion", "cpu_adagrad", "fused_lamb", "async_io", "utils", "transformer"), True)),
    Row("launcher.runner launcher.launch", "main DEEPSPEED_ENVIRONMENT_NAME", "launcher", "the command `deepspeed`"),
    Row("git_version_info .", "version", "value", VERSION),
    Row(".", "__version__", "value", VERSION),
    Row(".", "__ebb__", "value", __ebb__),
    Row(". constants", "TORCH_DISTRIBUTED_DEFAULT_PORT", "value", 29500),
    Row("runtime.constants", "ROUTE_TRAIN", "value", "train"),
    Row("runtime.constants", "ROUTE_EVAL", "value", "eval"),
    Row("runtime.constants", "ROUTE_PREDICT", "value", "predict"),
    Row("monitor.monitor", "MonitorMaster", "nothing", "programs log `engine.ebb.report()`"),
    Row("profiling.flops_profiler profiling.flops_profiler.profiler", "FlopsProfiler get_model_profile", "refused",
        "the timeline (`ebb.trace`) shows times; use torch's FlopCounterMode for operations"),
    Row(". pipe runtime.pipe.engine", "PipelineModule PipelineEngine LayerSpec TiedLayerSpec", "refused", "there are no pipeline stages"),
    Row("moe.utils moe.layer", "is_moe_param split_params_into_different_moe_groups_for_optimizer", "small_names", "no; the groups as they are"),
    Row("moe.layer", "MoE", "refused", "experts are not spread over ranks; models with experts of their own train"),
    Row(".", "init_inference InferenceEngine DeepSpeedInferenceConfig", "refused", "Ebb trains: call the model itself"),
    Row(".", "tp_model_init set_autotp_mode", "refused", "through these names every rank is data-parallel; `ebb.initialize` has tensor parallelism"),
    Row(". runtime.hybrid_engine", "DeepSpeedHybridEngine", "refused", "there is no hybrid engine: call the model's generate()"),
    Row(". ops.transformer", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig", "refused", "kernels are the model's"),
    Row("zero runtime.zero", "TiledLinear TiledLinearReturnBias", "refused", "use torch's Linear: one layer is gathered at a time"),
    Row("linear", "OptimizedLinear LoRAConfig QuantizationConfig", "refused", "use peft"),
    Row("compression compression.compress", "init_compression redundancy_clean", "refused", "parameters are trained as they are"),
    Row("sequence.layer", "DistributedAttention", "refused", "sequence parallelism is not built"),
    Row("runtime.sequence_parallel.ulysses_sp", "UlyssesSPAttentionHF", "small_names", "nothing with a size of 1; a larger one is refused"),
    Row("runtime.sequence_parallel.ulysses_sp", "UlyssesSPDataLoaderAdapter TiledMLP SequenceTiledCompute TiledFusedLogitsLoss",
        "refused", "sequence parallelism is not built"),
    Row("elasticity", "compute_elastic_config elasticity_enabled ElasticityError", "refused",
        "set batch sizes: every checkpoint is loaded by any number of ranks"),
    Row("autotuning", "Autotuner", "refused", "`ebb-plan` predicts memory and time"),
    Row("runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler CreateLossScaler", "refused", "the engine scales: engine.backward(loss)"),
    Row("ops.aio", "aio_handle", "refused", "the engine reads and writes its own swap files"),
)

_SUBMODULES = {
    ".".join(path.split(".")[:end]) for row in TABLE for path in row.modules.split() if path != "." for end in range(1, path.count(".") + 2)
}


def _rows(module: str) -> Iterator[Row]:
    return (row for row in TABLE if module in row.modules.split())


def _found(module: str, name: str) -> Row | None:
    rows = [row for row in _rows(module) if name in row.names.split()]
    return rows[0] if rows else next((row for row in _rows(module) if row.names == "*" and hasattr(_source(row.source), name)), None)


def _source(name: str) -> Any:
    return importlib.import_module(name if name.startswith("ebb.") else f"ebb.deepspeed.{name}")


def value(module: str, name: str) -> Any:
    """What `deepspeed.module.name` is; module ".": deepspeed itself. Raises AttributeError."""
    full = name if module == "." else f"{module}.{name}"
    row = _found(module, name)
    if row is None:
        if full in _SUBMODULES:
            return importlib.import_module(f"deepspeed.{full}")
        raise AttributeError(f"Ebb has no 'deepspeed.{full}' under DeepSpeed's names")
    if row.source == "value":
        return row.note
    if row.source in ("refused", "nothing"):
        return _class_of(full, row)
    return getattr(_source(row.source), name)


def _class_of(full: str, row: Row) -> type:
    """It can be imported, inherited from, and given to isinstance()."""

    def refuse(kind: type, *arguments: Any, **keywords: Any) -> Any:
        if row.source == "nothing":
            return object.__new__(kind)
        raise Error(f"deepspeed.{full} is not built: {row.note}", "UNIMPLEMENTED")

    body: dict[str, Any] = {"__new__": refuse, "__module__": f"deepspeed.{full.rpartition('.')[0]}".rstrip(".")}
    if row.source == "nothing":
        body["__init__"] = lambda self, *arguments, **keywords: None
        body["__getattr__"] = lambda self, name: lambda *arguments, **keywords: None
    return type(full.rpartition(".")[2], (), body)


def verdict(name: str) -> str:
    """Of a name such as "deepspeed.zero.Init": "runs", "refused: why" or "unknown"."""
    parts = name.split(".")[1:]
    if not parts or ".".join(parts) in _SUBMODULES or name == "deepspeed.__file__":
        return "runs"
    for end in range(len(parts) - 1, -1, -1):
        module = ".".join(parts[:end]) or "."
        if module == "." or module in _SUBMODULES:
            row = _found(module, parts[end])
            if row is None:
                return "unknown"
            if row.source == "refused":
                return f"refused: {row.note}"
            found, inner = value(module, parts[end]), parts[end + 1 :]
            return "unknown" if inner and isinstance(found, type) and not hasattr(found, inner[0]) else "runs"
    return "unknown"


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        path = self.__name__.partition(".")[2] or "."
        if name.startswith("__") and name not in ("__version__", "__ebb__", "__compatible_ops__"):
            raise AttributeError(name)
        found = value(path, name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        path = self.__name__.partition(".")[2] or "."
        return sorted({*super().__dir__(), *(name for row in _rows(path) for name in row.names.split() if name != "*")})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules below deepspeed, and refuses others by name."""

    def find_spec(self, full: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        above, _, name = full.partition(".")
        if above != "deepspeed" or not name:
            return None
        if name not in _SUBMODULES:
            raise ModuleNotFoundError(f"Ebb has no '{full}' under DeepSpeed's names", name=full)
        return importlib.machinery.ModuleSpec(full, self, is_package=any(one.startswith(f"{name}.") for one in _SUBMODULES))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def fill(name: str) -> None:
    """Gives the package `name`, which is deepspeed, the names of the table, when they are asked for."""
    sys.modules[name].__class__ = _Module
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
