"""deepspeed.comm: torch.distributed, whose group begins after Ebb's ranks have met."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._library import Error
from .._world import free_port, meet


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int | None = None, verbose: bool = True,
    timeout: timedelta | None = None, init_method: str | None = None, dist_init_required: bool | None = None, config: Any = None, rank: int = -1,
    world_size: int = -1,
) -> None:
    """Connects Ebb's ranks, then torch's. If torch's are connected already, Ebb's meet at a port that rank 0 finds."""
    if not dist.is_available():
        raise Error("this torch is without torch.distributed", "UNIMPLEMENTED")
    if dist.is_initialized():
        meet()
        return
    assert dist_init_required is not False, (
        "Distributed backend is not initialized. Please set dist_init_required to True or initialize before calling deepspeed.initialize()"
    )
    if rank >= 0 and world_size > 0:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    world = meet()
    os.environ.setdefault("RANK", str(world.rank))
    os.environ.setdefault("WORLD_SIZE", str(world.size))
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port or (free_port() if world.size == 1 else 29500)))
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    where = {"init_method": init_method, "rank": world.rank, "world_size": world.size} if init_method else {}
    dist.init_process_group(backend, **({"timeout": timeout} if timeout else {}), **where)


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else meet().rank


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else meet().size


get_local_rank = lambda: meet().local_rank
get_world_group = lambda: dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    return dist.get_global_rank(group, group_rank) if group is not None else group_rank


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **ignored: Any) -> Any:
    return dist.barrier(group, async_op=async_op, device_ids=device_ids) if dist.is_initialized() else None


def initialize_mesh_device(*arguments: Any, **keywords: Any) -> Any:
    raise Error("initialize_mesh_device: sequence parallelism is not built, so every rank is data-parallel", "UNIMPLEMENTED")


log_summary = configure = lambda *arguments, **keywords: None  # engine.ebb.communication() has the bytes of the last step


def _get_world_group() -> Any:
    return dist.group.WORLD if dist.is_initialized() else None


# utils.groups: of ranks that are all data-parallel.
_get_data_parallel_group = _get_sequence_data_parallel_group = _get_data_parallel_group_of_all = _get_world_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = lambda *arguments: get_world_size()
_get_data_parallel_rank = _get_sequence_data_parallel_rank = lambda *arguments: get_rank()
_get_model_parallel_world_size = _get_sequence_parallel_world_size = _get_expert_model_parallel_world_size = lambda *arguments: 1
_get_model_parallel_rank = _get_sequence_parallel_rank = _get_broadcast_src_rank = lambda *arguments: 0
_get_model_parallel_group = _get_sequence_parallel_group = lambda *arguments: None


def __getattr__(name: str) -> Any:
    """All other names are torch.distributed's."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"Ebb has no 'deepspeed.comm.{name}' under DeepSpeed's names") from None
