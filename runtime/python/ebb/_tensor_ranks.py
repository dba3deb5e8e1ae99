"""How many tensor ranks a run has: by its model's DTensors, and by its configuration, which has a transformers model cut by its own plan."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import sys
from typing import Any, Callable, Iterator

import torch
from torch import nn

from ._blocks import mesh_of, take_values, tensor_ranks_of
from ._library import Error
from ._model import Config, config_text, resolved
from ._tensor_faults import torchs_store
from ._world import World, meet

_calls = itertools.count()
_CUT_BEFORE = "cut it before ebb.initialize, by torch.distributed.tensor.parallel.parallelize_module(model, mesh['tp'], plan)"
_KEYS = (("ebb", "mesh", "tensor"), ("tensor_parallel", "autotp_size"))


def with_mesh(model: nn.Module, config: Config, world: World, values_of_rank_0: bool | None = None) -> tuple[str, Any, bool]:
    """The configuration as JSON text that says the tensor ranks, the DeviceMesh of the model's DTensors, or None, and whether the model has its
    initial values. If the configuration says tensor ranks, and the model has no DTensors, the model is cut here, and before that it gets them."""
    text, mesh = config_text(config), mesh_of(model, world.rank, world.size)
    given = _parsed(text)
    stated = stated_ranks(given)
    if mesh is None:
        ranks = _asked(text, stated, world.size)
        return (text, _cut(model, ranks, next(iter(stated)), world, values_of_rank_0), True) if ranks > 1 else (text, None, False)
    for key, value in stated.items():
        if value != mesh.size():
            raise Error(f'"{key}" is {value}, but the model\'s DTensors are over {mesh.size()} tensor ranks: both must agree', "INVALID_ARGUMENT")
    if not stated and mesh.size() > 1:
        given.get("tensor_parallel", {}).pop("autotp_size", None)  # 0, or "auto"
        given.setdefault("ebb", {}).setdefault("mesh", {})["tensor"] = mesh.size()
        text = json.dumps(given)
    return text, mesh, False


def _parsed(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):  # the library has the error
        return json.loads(text)
    return {}


def _asked(text: str, stated: dict[str, int], size: int) -> int:
    """How many tensor ranks the configuration asks for."""
    for key, ranks in stated.items():
        if size % ranks:
            raise Error(f'"{key}" is {ranks}, which does not divide the {size} rank(s)', "INVALID_ARGUMENT")
    if stated:
        resolved(text, size)  # raises if the keys differ
    return max(stated.values(), default=1)


def stated_ranks(given: Any) -> dict[str, int]:
    """The keys of a configuration that say the tensor ranks, and their values."""
    return {".".join(path): value for path in _KEYS if type(value := _at(given, path)) is int and value > 0}


def _at(given: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        given = given.get(name) if isinstance(given, dict) else None
    return given


def _plan_of(model: nn.Module, ranks: int, key: str) -> dict[str, str]:
    """A transformers model's own plan: how each module and parameter is cut. `key` asks for these ranks."""
    kind = type(model).__name__
    if getattr(model, "peft_config", None):
        raise Error(f"{kind} has adapters of peft, which \"{key}\" does not cut: train the adapters on data ranks alone", "UNIMPLEMENTED")
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel) or not getattr(model, "tp_plan", None):
        raise Error(
            f"the configuration asks for {ranks} tensor ranks, but {kind} has no tp_plan, as many models of transformers have: {_CUT_BEFORE}",
            "UNIMPLEMENTED"
        )
    try:
        from transformers.distributed import DistributedConfig

        plan = model._resolve_parallel_plans(DistributedConfig(tp_size=ranks))[0]
    except (ImportError, AttributeError) as error:
        raise Error(
            f"this transformers ({transformers.__version__}) cuts models in another way ({error}): take a newer one, or call parallelize_module before "
            "ebb.initialize", "UNIMPLEMENTED"
        ) from error
    _check_heads(model.config.get_text_config(), plan, ranks, key)
    return plan


# What has a block of heads on each rank, and reads it as such.
_HEADS = {"num_attention_heads": ("q_proj", "q_b_proj", "qkv_proj", "query_key_value"), "num_key_value_heads": ("k_proj", "v_proj", "qkv_proj")}


def _check_heads(config: Any, plan: dict[str, str], ranks: int, key: str) -> None:
    cut = {name.rpartition(".")[2] for name, style in plan.items() if style in ("colwise", "packed_colwise")}
    heads = {name: value for name, of in _HEADS.items() if type(value := getattr(config, name, None)) is int and cut & set(of)}
    for name, value in heads.items():
        if value % ranks:
            common = math.gcd(*heads.values())
            fit = [str(number) for number in range(1, common + 1) if common % number == 0]
            raise Error(f'{name} {value} is not divisible by "{key}" {ranks}: take {" or ".join(fit)}', "INVALID_ARGUMENT")


def _apply(model: nn.Module, mesh: Any, plan: dict[str, str]) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    tied = _untie(model)
    try:
        apply_tensor_parallelism(model, mesh, plan)
    except Exception as error:
        raise Error(
            f"transformers cannot cut this {type(model).__name__} by its tp_plan: {type(error).__name__}: {error}. Train it on data ranks alone, "
            f"or {_CUT_BEFORE}", "UNIMPLEMENTED"
        ) from error
    _tie_again(model, tied)


def _cut(model: nn.Module, ranks: int, key: str, world: World, values_of_rank_0: bool | None = None) -> Any:
    """Collective: cuts a transformers model by its own plan, with the values that this rank has."""
    from torch.distributed.device_mesh import init_device_mesh

    _agree_on(ranks, world)
    plan = _plan_of(model, ranks, key)
    device = next(model.parameters()).device.type
    if values_of_rank_0 is not None:  # None: values come from elsewhere
        _make_whole_values_equal(model, world, values_of_rank_0)
    mesh = init_device_mesh("cpu" if device == "meta" else device, (world.size // ranks, ranks), mesh_dim_names=("dp", "tp"))["tp"]
    _apply(model, mesh, plan)
    return mesh


def cut_alone(model: nn.Module, config: Config, size: int, mesh_of_ranks: Callable[[int], Any]) -> nn.Module | None:
    """If the configuration asks for tensor ranks, and the model is whole: a copy without values that is cut as on tensor rank 0 of `size` ranks. It
    needs none of them. `mesh_of_ranks`: makes the mesh of a number of tensor ranks."""
    text = config_text(config)
    stated = stated_ranks(_parsed(text))
    if tensor_ranks_of(model) > 1 or (ranks := _asked(text, stated, size)) == 1:
        return None
    plan = _plan_of(model, ranks, next(iter(stated)))
    empty = {id(one): nn.Parameter(one.detach().to("meta"), requires_grad=one.requires_grad) for one in model.parameters()}
    copied = copy.deepcopy(model, empty)
    _apply(copied, mesh_of_ranks(ranks), plan)
    return copied


# Torch keeps what it has found out of DTensors, by the ranks of their mesh. No other mesh may have those of one without a real group.
_ranks_of_no_group = itertools.count(1 << 16, 1 << 10)


def mesh_without_groups(ranks: int) -> Any:
    """For shapes alone."""
    from torch.distributed.device_mesh import DeviceMesh

    first = next(_ranks_of_no_group)
    return DeviceMesh("cpu", torch.arange(first, first + ranks), mesh_dim_names=("tp",), _init_backend=False, _rank=first)


@contextlib.contextmanager
def silent_group() -> Iterator[Callable[[int], Any]]:
    """Yields a function that makes a mesh whose collectives do nothing, for a forward with fake tensors."""
    import torch.distributed as dist

    made = False

    def mesh_of_ranks(ranks: int) -> Any:
        nonlocal made
        if dist.is_initialized():
            raise Error("torch has a process group already: give a model that is cut, or call this before the group is made", "UNIMPLEMENTED")
        from torch.distributed.device_mesh import DeviceMesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        first = next(_ranks_of_no_group)
        dist.init_process_group("fake", store=FakeStore(), rank=first, world_size=first + ranks)
        made = True
        return DeviceMesh("cpu", torch.arange(first, first + ranks), mesh_dim_names=("tp",))

    try:
        yield mesh_of_ranks
    finally:
        if made:
            dist.destroy_process_group()


def _agree_on(ranks: int, world: World) -> None:
    """Collective, before the ranks of a mesh wait for each other in torch: an error if they ask for different numbers of tensor ranks."""
    meet()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()
    asked = _of_all_ranks(ranks, world)
    if len(set(asked)) > 1:
        raise Error(f"the ranks ask for different numbers of tensor ranks: {', '.join(map(str, asked))}, from rank 0 on", "INVALID_ARGUMENT")


def _of_all_ranks(value: Any, world: World) -> list[Any]:
    """Collective: what each rank gives. Torch's store needs no device, as a collective would."""
    store, call = torchs_store(), next(_calls)
    store.set(f"ebb/{call}/{world.rank}", json.dumps(value))
    return [json.loads(store.get(f"ebb/{call}/{rank}")) for rank in range(world.size)]


def _make_whole_values_equal(model: nn.Module, world: World, by_rank_0: bool) -> None:
    """Collective, before the cut, because blocks of other values would make a model of several: takes rank 0's, or raises if they differ."""
    if by_rank_0:
        take_values(model, lambda parameter: (0, None))
        return
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    of = {
        name: int(parameter.detach().contiguous().view(bits[parameter.itemsize]).sum(dtype=torch.int64))
        for name, parameter in model.named_parameters() if not parameter.is_meta and not parameter.is_complex()
    }
    for rank, other in enumerate(_of_all_ranks(of, world)):
        name = next((name for name, value in of.items() if other.get(name) != value), None)
        if name is not None:
            raise Error(f"ranks {world.rank} and {rank} have other initial values of '{name}': give all ranks one seed, or values_of_rank_0=True")


def _untie(model: nn.Module) -> dict[str, str]:
    """Gives each place of a tied parameter one of its own, over the same memory, because a plan cuts each place. Returns the first place by the name
    of each other one."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
            module, _, key = name.rpartition(".")
            model.get_submodule(module)._parameters[key] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    return tied


def _tie_again(model: nn.Module, tied: dict[str, str]) -> None:
    for name, first in tied.items():
        parameter, other = model.get_parameter(first), model.get_parameter(name)
        one, another = (getattr(each, "placements", None) for each in (parameter, other))
        if one != another:
            raise Error(f"'{first}' and '{name}' are one parameter, but the plan cuts them in two ways, {one} and {another}", "UNIMPLEMENTED")
        module, _, key = name.rpartition(".")
        model.get_submodule(module)._parameters[key] = parameter
