"""Parameters that are DTensors over "tp", the tensor ranks of "ebb.mesh". Each of these ranks has a block of such a parameter, the DTensor's local
tensor, and the engine gives it memory. Names, shapes, files and gathered values are those of the whole."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from ._library import Error


class Block(NamedTuple):
    """What this rank has of a parameter."""

    dimension: int
    parts: int  # of equal sizes along it, each cut by itself, such as gate and up in one
    sizes: tuple[int, ...]  # of the blocks, by tensor rank
    rank: int

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    def take(self, into: torch.Tensor, values: torch.Tensor, begin: int) -> None:
        """Copies what belongs to this rank's block `into` of `values`, which are numbers of the whole, in its order, from number `begin` on."""
        inner = into.shape[self.dimension + 1 :].numel()
        part, own = sum(self.sizes) // self.parts * inner, self.sizes[self.rank] // self.parts * inner
        first = sum(self.sizes[: self.rank]) // self.parts * inner
        row, at = part * self.parts, 0  # a row: numbers of the whole dimension, of which each part has one run of this block
        rows = into.view(-1, own * self.parts)
        while at < len(values):
            number, behind = divmod(begin + at, row)
            count = (len(values) - at) // row if behind == 0 else 0  # of rows that are complete here
            size = count * row or min(row - behind, len(values) - at)
            given = values[at : at + size].view(count or 1, -1)
            for i in range(self.parts):
                low, high = max(i * part + first, behind), min(i * part + first + own, behind + size // (count or 1))
                if low < high:
                    to = low - i * part - first + i * own
                    rows[number : number + (count or 1), to : to + high - low].copy_(given[:, low - behind : high - behind])
            at += size


def is_dtensor(tensor: torch.Tensor) -> bool:
    return getattr(type(tensor), "_local_tensor", None) is not None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the values that this rank has."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def set_local(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """As `parameter.data = value`, of the values that this rank has."""
    if is_dtensor(parameter):
        parameter._local_tensor = value
    else:
        parameter.data = value


def block_of(name: str, parameter: torch.Tensor) -> Block | None:
    """None: each tensor rank has all of it. Raises an error that names the parameter and a placement that is not taken."""
    if not is_dtensor(parameter):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names
    if mesh.ndim != 1 or (names or ("tp",)) != ("tp",):
        over = ", ".join(map(repr, names)) if names else f"a mesh of {mesh.ndim} dimensions"
        raise Error(
            f"parameter '{name}' is a DTensor over {over}, with the placement {_shown(placements)}: DTensors over 'tp' alone are taken, and the engine "
            "itself shards over the other ranks. Give parallelize_module mesh['tp'], and leave out FSDP", "UNIMPLEMENTED"
        )
    placement, ranks = placements[0], mesh.size()
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "_StridedShard"):
        raise Error(
            f"parameter '{name}' is a DTensor with the placement {_shown(placements)}: Shard cuts it and Replicate keeps it whole, and others are not "
            "taken", "UNIMPLEMENTED"
        )
    if ranks == 1:
        return None
    dimension, parts = placement.dim % parameter.dim(), getattr(placement, "split_factor", 1)
    size = parameter.shape[dimension]
    if size % (parts * ranks) == 0:
        sizes = [size // ranks] * ranks
    elif parts == 1:
        each = -(-size // ranks)  # as torch.chunk
        sizes = [max(0, min(each, size - rank * each)) for rank in range(ranks)]
    else:
        sizes = [0]
    if 0 in sizes:
        raise Error(
            f"parameter '{name}' has the placement {_shown(placements)}, but dimension {dimension} of {list(parameter.shape)} does not divide into "
            f"{parts} part(s) for {ranks} tensor ranks", "INVALID_ARGUMENT"
        )
    return Block(dimension, parts, tuple(sizes), mesh.get_coordinate()[0])


def _shown(placements: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, placements))


def mesh_of(model: nn.Module, rank: int, size: int) -> Any:
    """The DeviceMesh of the model's DTensors; None: it has none. `rank`, `size`: of this process."""
    mesh, first = None, ""
    for name, parameter in model.named_parameters():
        if not is_dtensor(parameter):
            continue
        block_of(name, parameter)
        if mesh is not None and parameter.device_mesh != mesh:
            raise Error(f"parameters '{first}' and '{name}' are DTensors over different meshes, {mesh} and {parameter.device_mesh}", "INVALID_ARGUMENT")
        mesh, first = parameter.device_mesh, name
    if mesh is not None:
        ranks, first_rank = mesh.mesh.tolist(), rank - rank % mesh.size()
        if ranks != list(range(first_rank, first_rank + mesh.size())) or size % mesh.size() != 0:
            raise Error(
                f"the mesh of '{first}' has the ranks {ranks}, but tensor ranks must be consecutive: "
                f"init_device_mesh(device, ({max(size // mesh.size(), 1)}, {mesh.size()}), mesh_dim_names=('dp', 'tp'))['tp']", "INVALID_ARGUMENT"
            )
    return mesh


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor, such as a loss of parallel logits: collective over its ranks."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def own_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of what this rank has. A partial one, as of a norm under sequence parallelism, is summed over the tensor ranks, which all make
    this call for the same parameters in one order."""
    gradient = parameter.grad
    if gradient is None or not is_dtensor(gradient):
        return gradient
    with torch.no_grad():
        if gradient.placements != parameter.placements:
            gradient = gradient.redistribute(placements=parameter.placements)
        local = gradient.to_local()
    return local.wait() if hasattr(local, "wait") else local


def take_values(model: nn.Module, sender_of: Callable[[torch.Tensor], tuple[int, Any]]) -> None:
    """Collective: each rank takes what the parameter's sender has, in a group of torch; None: of all ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            sender, group = sender_of(parameter)
            value = local_of(parameter).detach()
            sent = value.contiguous()
            torch.distributed.broadcast(sent, src=sender, group=group)
            if sent is not value:
                value.copy_(sent)


def take_values_of_rank_0(model: nn.Module, mesh: Any, size: int) -> None:
    """Collective: each tensor rank takes the blocks that its first data rank has, and rank 0's values of what is no DTensor."""
    import torch.distributed as dist

    ranks = mesh.size()
    groups = [dist.new_group(list(range(one, size, ranks))) for one in range(ranks)]
    own = mesh.get_local_rank()
    take_values(model, lambda parameter: (own, groups[own]) if is_dtensor(parameter) else (0, None))
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def with_local(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor like `parameter`, with other values."""
    from torch.distributed.tensor import DTensor

    shape = parameter.shape
    stride = torch.empty(shape, device="meta").stride()
    with torch.no_grad():
        return DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def tensor_ranks_of(model: nn.Module) -> int:
    """By its DTensors."""
    return next((parameter.device_mesh.size() for parameter in model.parameters() if is_dtensor(parameter)), 1)
