"""DeepSpeed's JSON: what Ebb's engine gets of it, and what is done in Python."""

import base64
import binascii
import copy
import json
import logging
import os
import re
from typing import Any, Callable, Mapping

import torch
from torch import nn

from .._library import Error
from .._model import compute_dtype, config_text, resolved
from .._world import meet

log = logging.getLogger("ebb")
_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16, "half": torch.float16,
           "fp32": torch.float32, "float32": torch.float32, "float": torch.float32}
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/', re.S)
_TRAILING_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(\s*[}\]])', re.S)


class DeepSpeedConfigError(Exception):
    pass


def read(config: Any) -> dict[str, Any]:
    """A dict, a path, or the base64 text of a JSON. Comments and trailing commas are allowed."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    text = os.fspath(config)
    if os.path.exists(text):
        with open(text, encoding="utf-8-sig") as file:
            text = file.read()
    else:
        try:
            text = base64.urlsafe_b64decode(text).decode()
        except (UnicodeDecodeError, binascii.Error, ValueError):
            raise ValueError(f"Expected a string path to an existing deepspeed config, or a dictionary or a valid base64. Received: {config}") from None
    text = _COMMENT.sub(lambda found: found[1] or " ", text)
    text = _TRAILING_COMMA.sub(lambda found: found[1] or found[2], text)
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"Duplicate keys in DeepSpeed config: {sorted({key for key in keys if keys.count(key) > 1})}")
    return made


def dtype_named(name: Any) -> torch.dtype:
    found = _DTYPES.get(str(name).lower().removeprefix("torch."))
    if found is None:
        raise Error(f"'{name}' is no dtype of a configuration: fp32, bf16 or fp16", "INVALID_ARGUMENT")
    return found


class DeepSpeedConfig:
    """The keys by their names in Python. `for_engine()` is what ebb.initialize gets."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None, world: int | None = None):
        refuse_parallel(mpu, mesh_device)
        self._param_dict = read(config)
        for name in [name for name in self._param_dict if "." in name]:  # TRL gives a model of reference such ones
            log.info('"%s": one name with a dot in it has no meaning, as in DeepSpeed', name)
        given = {name: copy.deepcopy(value) for name, value in self._param_dict.items() if "." not in name}
        self.optimizer = self._named(given.pop("optimizer", None))
        self.scheduler = self._named(given.pop("scheduler", None))
        managed = given.pop("managed_gradient_accumulation", True)
        self.managed = True if managed is None else bool(managed)
        self.sums_ranks = str(given.pop("gradient_allreduce_op", None) or "mean").lower() == "sum"
        self.dataloader_drop_last = bool(given.pop("dataloader_drop_last", False))
        if given.pop("sparse_gradients", False):
            log.info("sparse_gradients: gradients are dense, which gives the same values")
        zero = given.get("zero_optimization")
        computes_norm, self.leaf_module = True, None
        if isinstance(zero, dict):
            self.leaf_module = zero.get("leaf_module")
            zero.pop("parameter_alignment", None)
            computes_norm = zero.pop("compute_grad_norm", None) is not False
        self.autocast = self._autocast(given.pop("torch_autocast", None))
        types = given.get("data_types") or {}
        buffers = types.pop("buffer_dtype", None)
        self.buffer_dtype = None if buffers is None else dtype_named(buffers)
        self.keep_in_fp32_modules = kept = types.pop("keep_in_fp32_modules", "auto")
        if kept != "auto" and not (isinstance(kept, list) and all(isinstance(one, str) for one in kept)):
            raise DeepSpeedConfigError(f'data_types.keep_in_fp32_modules must be "auto" or a list of name patterns, got {kept!r}')
        self.loads_universal = bool((given.get("checkpoint") or {}).get("load_universal"))
        mesh = (given.get("ebb") or {}).get("mesh") or {}
        if (ranks := (given.get("tensor_parallel") or {}).get("autotp_size") or mesh.get("tensor")) not in (None, 0, 1, "auto"):
            raise Error(f"autotp_size {ranks}: through DeepSpeed's names every rank is data-parallel. ebb.initialize takes tensor ranks", "UNIMPLEMENTED")
        world = meet().size if world is None else world
        self.world_size, self._given = world, given
        self.resolved = resolved(config_text(given), world)
        self.train_batch_size = int(self.resolved["train_batch_size"])
        self.train_micro_batch_size_per_gpu = int(self.resolved["train_micro_batch_size_per_gpu"])
        self.gradient_accumulation_steps = int(self.resolved["gradient_accumulation_steps"])
        self.gradient_clipping = float(self.resolved.get("gradient_clipping", 1.0))
        self.zero_optimization_stage = int(self.resolved.get("zero_optimization", {}).get("stage", 0))
        self.dtype = compute_dtype(self.resolved)
        if not computes_norm and self.gradient_clipping > 0:
            raise ValueError("zero_optimization.compute_grad_norm is false, but gradient_clipping needs the norm: set gradient_clipping to 0")
        if self.autocast is not None and self.dtype != torch.float32:
            raise Error("torch_autocast beside \"bf16\" or \"fp16\": enable one of them", "INVALID_ARGUMENT")

    def names_in_fp32(self, model: nn.Module) -> re.Pattern[str] | None:
        """Of the buffers that stay in fp32 beside bf16 or fp16: keep_in_fp32_modules, or with "auto" the lists that transformers' models have."""
        patterns = [] if self.keep_in_fp32_modules == "auto" else [one.replace("*", ".*") for one in self.keep_in_fp32_modules]
        if self.keep_in_fp32_modules == "auto":
            lists = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")[: 2 if self.dtype == torch.float16 else 1]
            for path, module in model.named_modules():
                names = [name.replace("*", ".*") for one in lists for name in getattr(module, one, None) or ()]
                patterns += [rf"^{re.escape(path)}\..*{name}" if path else name for name in names]
        return re.compile("|".join(patterns)) if patterns and self.dtype != torch.float32 else None

    zero_enabled = property(lambda self: self.zero_optimization_stage > 0)

    @property
    def gathers_on_save(self) -> bool:
        zero = self._param_dict.get("zero_optimization")
        names = ("gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
        return isinstance(zero, dict) and any(zero.get(name) is True for name in names)

    @property
    def updates_anywhere(self) -> bool:
        """Whether DeepSpeed's optimizer.step() finds the gradients so far between boundaries, too."""
        offload = self.resolved.get("zero_optimization", {}).get("offload_optimizer") or {}
        return self.zero_optimization_stage == 3 and offload.get("device", "none") == "none"

    def for_engine(self, backwards: int) -> dict[str, Any]:
        """`backwards`: of a step, at most."""
        made = copy.deepcopy(self._given)
        made.pop("train_batch_size", None)
        made["train_micro_batch_size_per_gpu"] = self.train_micro_batch_size_per_gpu
        made["gradient_accumulation_steps"] = backwards
        if self.world_size == 1 and not (made.get("zero_optimization") or {}).get("offload_optimizer"):
            made["ebb"] = {"reduce_at": "step", **(made.get("ebb") or {})}  # gradients are summed where backward writes them
        return made

    @staticmethod
    def _named(section: Any) -> dict[str, Any] | None:
        return section if section and section.get("type") else None

    @staticmethod
    def _autocast(section: Any) -> torch.dtype | None:
        if not section or section.get("enabled") is not True:
            return None
        if section.get("lower_precision_safe_modules"):
            raise Error("torch_autocast.lower_precision_safe_modules is not built: leave it out", "UNIMPLEMENTED")
        dtype = dtype_named(section.get("dtype") or "bf16")
        if dtype == torch.float16:
            raise Error("torch_autocast.dtype fp16 is not built, because it needs a loss scale: use bf16, or enable \"fp16\"", "UNIMPLEMENTED")
        return dtype


def refuse_parallel(mpu: Any, mesh: Any) -> None:
    if mesh is not None:
        raise Error("mesh_param: sequence parallelism is not built, so every rank is data-parallel", "UNIMPLEMENTED")
    size = getattr(mpu, "get_tensor_model_parallel_world_size", None) or getattr(mpu, "get_model_parallel_world_size", None)
    if size is not None and size() > 1:
        raise Error("mpu= with model-parallel ranks: through DeepSpeed's names every rank is data-parallel", "UNIMPLEMENTED")


def add_config_arguments(parser: Any) -> Any:
    """--deepspeed, and --deepspeed_config FILE."""
    group = parser.add_argument_group("DeepSpeed", "configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="a flag for the program itself")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the JSON file")
    group.add_argument("--deepscale", default=False, action="store_true", help="an old name of --deepspeed")
    group.add_argument("--deepscale_config", default=None, type=str, help="an old name of --deepspeed_config")
    return parser


def _stated(name: str) -> Callable[[Any], Any]:
    return lambda self: getattr(self._config, name)


class Facts:
    """What a DeepSpeedEngine says of its configuration."""

    _config: DeepSpeedConfig
    optimizer: Any
    gather_16bit_weights_on_model_save: bool
    basic_optimizer: torch.optim.Optimizer

    train_batch_size, train_micro_batch_size_per_gpu = _stated("train_batch_size"), _stated("train_micro_batch_size_per_gpu")
    gradient_accumulation_steps, gradient_clipping = _stated("gradient_accumulation_steps"), _stated("gradient_clipping")
    managed_gradient_accumulation, zero_optimization_stage = _stated("managed"), _stated("zero_optimization_stage")

    get_batch_info = lambda self: (self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps())
    zero_optimization = lambda self: self.zero_optimization_stage() > 0
    zero_optimization_partition_gradients = lambda self: self.zero_optimization_stage() >= 2
    zero_optimization_partition_weights = lambda self: self.zero_optimization_stage() == 3
    zero_gather_16bit_weights_on_model_save = lambda self: self.gather_16bit_weights_on_model_save
    bfloat16_enabled = lambda self: self._config.dtype == torch.bfloat16
    fp16_enabled = lambda self: self._config.dtype == torch.float16
    get_data_types = lambda self: (self._config.dtype, self._config.dtype)
    optimizer_name = lambda self: type(self.basic_optimizer).__name__ if self.optimizer is not None else None
    scheduler_name = lambda self: self._config.scheduler["type"] if self._config.scheduler else None
