"""How many tensor ranks a run has: by its model's DTensors, and by its configuration, which has a transformers model cut by its own plan."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from typing import Any

import torch
from torch import nn

from ._blocks import mesh_of
from ._library import Error
from ._model import Config, config_text, resolved
from ._world import World, meet

_calls = itertools.count()
_KEYS = (("ebb", "mesh", "tensor"), ("tensor_parallel", "autotp_size"))


def with_mesh(model: nn.Module, config: Config, world: World, cuts: bool = True, values_of_rank_0: bool | None = None) -> tuple[str, Any]:
    """The configuration as JSON text that says the tensor ranks, and the DeviceMesh of the model's DTensors, or None. If the configuration says
    them, and the model has no DTensors, the model is cut here, or `cuts` is false, and that is an error."""
    text, mesh = config_text(config), mesh_of(model, world.rank, world.size)
    given: dict[str, Any] = {}
    with contextlib.suppress(ValueError):  # the library has the error
        given = json.loads(text)
    stated = stated_ranks(given)
    if mesh is None:
        ranks = max(stated.values(), default=1)
        if ranks > 1:
            resolved(text, world.size)  # raises if the keys differ, or do not divide the ranks
            if not cuts:
                raise Error(f"the configuration asks for {ranks} tensor ranks: give a model that parallelize_module has cut", "INVALID_ARGUMENT")
            mesh = _cut(model, ranks, world, values_of_rank_0)
        return text, mesh
    for key, value in stated.items():
        if value != mesh.size():
            raise Error(f'"{key}" is {value}, but the model\'s DTensors are over {mesh.size()} tensor ranks: both must agree', "INVALID_ARGUMENT")
    if not stated and mesh.size() > 1:
        given.get("tensor_parallel", {}).pop("autotp_size", None)  # 0, or "auto"
        given.setdefault("ebb", {}).setdefault("mesh", {})["tensor"] = mesh.size()
        text = json.dumps(given)
    return text, mesh


def stated_ranks(given: Any) -> dict[str, int]:
    """The keys of a configuration that say the tensor ranks, and their values."""
    return {".".join(path): value for path in _KEYS if type(value := _at(given, path)) is int and value > 0}


def _at(given: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        given = given.get(name) if isinstance(given, dict) else None
    return given


def _cut(model: nn.Module, ranks: int, world: World, values_of_rank_0: bool | None = None) -> Any:
    """Collective: cuts a transformers model by its own plan, with the values that this rank has."""
    kind = type(model).__name__
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel) or not getattr(model, "tp_plan", None):
        raise Error(
            f"the configuration asks for {ranks} tensor ranks, but {kind} has no tp_plan, as models of transformers have: cut it before ebb.initialize, "
            f"torch.distributed.tensor.parallel.parallelize_module(model, mesh['tp'], plan)", "UNIMPLEMENTED"
        )
    try:
        from transformers.distributed import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        plan = model._resolve_parallel_plans(DistributedConfig(tp_size=ranks))[0]
    except (ImportError, AttributeError) as error:
        raise Error(
            f"this transformers ({transformers.__version__}) cuts models in another way ({error}): take a newer one, or call parallelize_module before "
            "ebb.initialize", "UNIMPLEMENTED"
        ) from error
    from torch.distributed.device_mesh import init_device_mesh

    device = next(model.parameters()).device.type
    _agree_on(ranks, world)
    if values_of_rank_0 is not None:  # None: values come from elsewhere
        _make_whole_values_equal(model, world, values_of_rank_0)
    mesh = init_device_mesh("cpu" if device == "meta" else device, (world.size // ranks, ranks), mesh_dim_names=("dp", "tp"))["tp"]
    tied = _untie(model)
    apply_tensor_parallelism(model, mesh, plan)
    _tie_again(model, tied)
    return mesh


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
    store, call = torch.distributed.distributed_c10d._get_default_store(), next(_calls)
    store.set(f"ebb/{call}/{world.rank}", json.dumps(value))
    return [json.loads(store.get(f"ebb/{call}/{rank}")) for rank in range(world.size)]


def _make_whole_values_equal(model: nn.Module, world: World, by_rank_0: bool) -> None:
    """Collective, before the cut, because blocks of other values would make a model of several: takes rank 0's, or raises if they differ."""
    if by_rank_0:
        with torch.no_grad():
            for parameter in model.parameters():
                sent = parameter.detach().contiguous()
                torch.distributed.broadcast(sent, src=0)
                parameter.copy_(sent)
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
