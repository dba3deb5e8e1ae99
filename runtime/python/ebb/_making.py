"""Makes an engine from a torch module, and predicts its memory and its operations without an engine."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
from ctypes import byref, c_void_p
from typing import Any, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from . import _library
from ._blocks import block_of, is_dtensor, local_of, take_values_of_rank_0, with_local
from ._files import Files
from ._fixed import refuse
from ._given_values import GivenValues
from ._hidden import has_value, without_value
from ._library import Error, library
from ._model import Config, Groups, Model, Said, config_text, dtype_function, group_function, resolved, tier_of_activations
from ._muon import matrix_update_function
from ._order import units_and_order
from ._own_updates import OwnUpdates
from ._reports import MemoryRow, memory_rows
from ._tensor_ranks import cut_alone, mesh_without_groups, with_mesh
from ._tensors import current_stream
from ._units import Unit, UnitsArgument
from ._world import World, open_world
from .engine import Engine

log = logging.getLogger("ebb")


def initialize(
    model: nn.Module, config: Config, *, units: UnitsArgument = None, example: Any = None, resident: Iterable[str] = (),
    groups: Groups | None = None, weights: str | os.PathLike | None = None, values: Mapping[str, torch.Tensor] | None = None,
    values_of_rank_0: bool = False, optimizer: torch.optim.Optimizer | OwnUpdates | None = None, dtype: str | None = None,
    device: str | None = None, threads: int = 0, name: str = "engine", check: bool = False, keep_memory: bool = False,
) -> Engine:
    """Shards `model` over the ranks and returns its engine. Collective: every rank calls it with the same model and config.

    config: DeepSpeed's JSON as a path or a dict; keys of Ebb's own are under "ebb" (docs/configuration.md).
    units: which modules are gathered together: modules, class names or paths, or a function of (path, module). Default: the
        children of ModuleLists and Sequentials, and the modules between them.
    example: a batch (a tensor, a tuple of arguments or a dict of keywords), or a function that takes the model and returns the
        loss. From one forward and backward the engine learns the order of the units, and the parameters that are used outside of
        their unit, which it keeps whole. It uses fake tensors, or the real ones if the model does not run with fake tensors.
        Default: the first batch shows the order. If a loop calls the model several times for one backward, give a function.
    resident: names or patterns of parameters that are kept whole on every rank, because they are used outside of their module.
    groups: for each group of "ebb.parameter_groups" a pattern (re.search) of the names of its parameters, or a list of these names. Or a
        function of a parameter's name that returns its group; "": none.
    weights: a safetensors file, or a folder of Hugging Face's. Every rank reads its own slices from it. This is for a model whose
        parameters are on the meta device (`ebb.empty_parameters()`).
    values: tensors by the names of state_dict(), instead of weights=: for example torch.load(file, mmap=True), of which each rank reads
        its own slices, so that a host has them once.
    values_of_rank_0: other ranks take rank 0's initial values. Otherwise, if values differ, an error names the parameter.
    optimizer: an element-wise optimizer of torch's over the model's parameters, in the place of the JSON's, such as torch.optim.Adamax. Its update
        runs over this rank's slices of the fp32 masters. Its groups' "lr" may change between steps, by torch's schedulers.
    dtype: "config": all parameters are computed in the configuration's dtype, also those of a model with several dtypes.
    device: "cpu", "cuda", "cuda:1". Default: the device of the parameters.
    threads: the number of threads for updates and reductions on the CPU; 0: the cores of the host divided by its ranks.
    check: if the first batch reads a parameter outside of its unit, the error names the operator and the line, as it does later.
    keep_memory: glibc keeps the memory that a step on the CPU has freed. Otherwise glibc gives it back to the system, which zeroes
        it page by page for the next step. The setting is of the whole process and lasts until its end. The heap can fragment, and
        the process keeps the memory of its largest step. If a MALLOC_* variable or GLIBC_TUNABLES is set, keep_memory does nothing.

    After this call the engine owns the parameters. They show their values while their unit runs. Otherwise they have their shape, and reading one
    is an error. engine.gather(name) and model.state_dict() read them at any time. Raises ebb.Error."""
    handle, world = open_world()
    with _told_to_all_ranks(handle, world.size, model, config, device, name) as texts:
        model = getattr(model, "_orig_mod", model)  # of torch.compile(model), which calls it
        refuse(model)
        own = optimizer if optimizer is None or isinstance(optimizer, OwnUpdates) else OwnUpdates(optimizer, model)
        config = config if own is None else own.config(config_text(config))
        text, mesh, has_values = with_mesh(model, config, world, values_of_rank_0=values_of_rank_0 if weights is None and values is None else None)
        texts.append(text)
        settings = resolved(text, world.size)
        if tier_of_activations(settings) == "nvme":
            raise Error(
                '"ebb.offload_activations" is "nvme": what a torch module saves for its backward can be in RAM ("cpu"), not on a disk', "UNIMPLEMENTED"
            )
        if weights is not None and values is not None:
            raise Error("weights= and values= both give initial values: give one of them", "INVALID_ARGUMENT")
        if weights is None and values is None:
            _refuse_hidden(model)
            _refuse_shared(model)
        on = torch.device(device) if device is not None else _device_of(model)
        is_cut = mesh is not None and mesh.size() > 1 and weights is None and values is None
        if is_cut and values_of_rank_0 and not has_values:
            take_values_of_rank_0(model, mesh, world.size)
        divided, order = units_and_order(model, units, example, resident, on)
        group_of = group_function(groups if own is None else own.members)
        files = Files(os.fspath(weights), model) if weights is not None else GivenValues(values, model) if values is not None else None
        if dtype not in (None, "config"):
            raise Error(f"dtype={dtype!r}: it is \"config\" or None, and the configuration has the type", "INVALID_ARGUMENT")
        dtype_of = dtype_function(model, settings, of_config=dtype is not None)
        _say_dtypes(model, dtype_of)
        described = Model(divided, order, Said(group_of, dtype_of, matrix_update_function(model)), files)
        options = _library.EngineOptions(
            threads=threads, device=str(on).encode(), name=name.encode(), compute_stream=current_stream(on),
            initial_values_of_rank_0=values_of_rank_0 and not is_cut, **(own.options() if own is not None else {}),
        )
    made = c_void_p()
    described.check(library.ebb_engine_create(handle, described.handle, text.encode(), byref(options), byref(made)))
    first_id = described.first_id
    del described  # and the copies of values that it has
    _move_compilation(divided)
    _renew_meta_parameters(model, divided, on)
    engine = Engine(model, world, settings, on, divided, order, example is not None, made.value, first_id, group_of, check, own)
    if files is not None and files.others:
        engine._entries.load(files.others, completes=True)
    if keep_memory and on.type == "cpu":
        _keep_memory_of_steps()
    return engine


@contextlib.contextmanager
def _told_to_all_ranks(handle: int, ranks: int, model: nn.Module, config: Config, device: str | None, name: str) -> Iterator[list[str]]:
    """An error within it, perhaps of this rank alone, ends initialize() on every rank. Yields a list for the text of the configuration that the
    other ranks may have."""
    texts: list[str] = []
    try:
        yield texts
    except Exception as error:
        if ranks > 1:
            text = _acceptable(texts[0] if texts else config, ranks)
            on = device or next((str(parameter.device) for parameter in model.parameters() if not parameter.is_meta), "cpu")
            options = _library.EngineOptions(device=on.encode(), name=name.encode(), error=f"{type(error).__name__}: {error}".encode())
            nothing = library.ebb_model_create()
            library.ebb_engine_create(handle, nothing, text.encode(), byref(options), byref(c_void_p()))
            library.ebb_model_destroy(nothing)
        raise


def _acceptable(config: Config, ranks: int) -> str:
    """The configuration, or if that is what is wrong, one with as little as possible, by which the ranks meet all the same."""
    candidates: list[str] = []
    with contextlib.suppress(Exception):
        candidates.append(config_text(config))
        timeout = json.loads(candidates[0])["ebb"]["timeout_seconds"]
        candidates.append(json.dumps({"train_micro_batch_size_per_gpu": 1, "ebb": {"timeout_seconds": timeout}}))
    for text in candidates:
        with contextlib.suppress(Error):
            resolved(text, ranks)
            return text
    return '{"train_micro_batch_size_per_gpu": 1}'


def _described(model: nn.Module, config: Config, world: int, units: UnitsArgument, example: Any, resident: Iterable[str]) -> tuple[Model, str]:
    divided, order = units_and_order(model, units, example, resident, torch.device("cpu"))
    cut = cut_alone(model, config, world, mesh_without_groups)
    text = config_text(config)
    if cut is None:
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        text = with_mesh(model, config, World(torch.distributed.get_rank() if has_ranks else 0, world, 0, 1))[0]
    dtype_of = dtype_function(model, resolved(text, world))
    said = Said(group_function(None), dtype_of, matrix_update_function(model))
    if cut is not None:
        of_name = dict(cut.named_parameters())
        said = said._replace(block=lambda name, _: block_of(name, of_name[name]))
    return Model(divided, order, said, has_values=False), text


def predict_memory(
    model: nn.Module, config: Config, world: int, *, units: UnitsArgument = None, example: Any = None, resident: Iterable[str] = ()
) -> list[MemoryRow]:
    """The bytes that a rank will hold, by class and tier, for the one of `world` ranks that needs most. The model may be on the meta
    device. Needs no ranks, no device and no disk. Activations are torch's, so they are not counted."""
    described, text = _described(model, config, world, units, example, resident)
    return memory_rows(library.ebb_predict_memory, described.handle, world, text.encode())


def plan(
    model: nn.Module, config: Config, world: int, *, units: UnitsArgument = None, example: Any = None, resident: Iterable[str] = ()
) -> str:
    """All operations that one rank runs in a step, as a table to read."""
    described, text = _described(model, config, world, units, example, resident)
    return _library.text_of(library.ebb_plan, described.handle, world, text.encode())


def _keep_memory_of_steps() -> None:
    """Makes glibc keep the memory that a step frees, as torch's allocator on a GPU does. Torch's tensors on the CPU come from malloc. By default
    glibc gives freed memory back to the system, which zeroes it page by page in the next step: up to a tenth of a small model's step. The
    memory that the model had before it was sharded is given back now. glibc has no call that undoes this."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return  # another C library, or the user has chosen
    ctypes.CDLL(None).malloc_trim(0)
    trim_threshold, mmap_threshold = -1, -3
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_threshold, 2**30) or mallopt(mmap_threshold, 2**25)  # 32 MiB is the limit of a glibc before 2.35


def _device_of(model: nn.Module) -> torch.device:
    kinds = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
    if len(kinds) > 1:
        raise Error(f"the parameters are on several devices, {', '.join(sorted(map(str, kinds)))}: choose one with device=", "INVALID_ARGUMENT")
    return kinds.pop() if kinds else torch.device("cpu")


def _renew_meta_parameters(model: nn.Module, units: list[Unit], device: torch.device) -> None:
    """Replaces parameters on the meta device wherever they are used, because such a parameter cannot be given other memory."""
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in renewed:
                made = without_value(local_of(parameter).shape, parameter.dtype, device, key)
                made = with_local(parameter, made) if is_dtensor(parameter) else made
                renewed[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
            module._parameters[key] = renewed[id(parameter)]
    for unit in units:
        unit.parameters = [renewed.get(id(parameter), parameter) for parameter in unit.parameters]


def _refuse_shared(model: nn.Module) -> None:
    """The engine would give each parameter memory of its own."""
    names: dict[tuple[torch.device, int], str] = {}
    for name, parameter in model.named_parameters():
        address = 0 if nn.parameter.is_lazy(parameter) else local_of(parameter).data_ptr()
        first = names.setdefault((parameter.device, address), name)
        if first != name and address != 0:  # 0: a meta tensor, a wrapper, or one without elements
            raise Error(
                f"'{first}' and '{name}' are two parameters over one memory: make them one parameter, as head.weight = embedding.weight does, or "
                "give each memory of its own", "INVALID_ARGUMENT"
            )


def _refuse_hidden(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not nn.parameter.is_lazy(parameter) and not has_value(parameter):
            raise Error(
                f"'{name}' has no values, because the engine that had them was closed. Close an engine with close(keep_values=True), or give the "
                "model values first, load_state_dict(values, assign=True), or name a file of them, weights="
            )


def _say_dtypes(model: nn.Module, dtype_of) -> None:
    cast = {name: parameter for name, parameter in model.named_parameters() if parameter.dtype != dtype_of(parameter)}
    kinds = sorted({(str(parameter.dtype), str(dtype_of(parameter))) for parameter in cast.values()})
    for kind, computed in kinds:
        level = logging.WARNING if kind == "torch.float64" else logging.INFO
        log.log(level, "parameters of %s are computed in %s, and updated in torch.float32", kind, computed)
    rounded = [
        name for name, parameter in cast.items()
        if not parameter.requires_grad and torch.promote_types(parameter.dtype, dtype_of(parameter)) != dtype_of(parameter)
    ]
    if rounded:
        computed = dtype_of(cast[rounded[0]])
        names = ", ".join(rounded[:5]) + (", ..." if rounded[5:] else "")
        log.warning("frozen parameters are rounded to %s, because they have no master: %s", computed, names)


def _move_compilation(units: Sequence[Unit]) -> None:
    """Compiles the forward of modules with the arguments of module.compile(), which would compile the hooks too."""
    for unit in units:
        for module in unit.modules:
            compiled = getattr(module, "_compiled_call_impl", None)
            if getattr(compiled, "__func__", None) is nn.Module._call_impl:  # compile(disable=True)
                module._compiled_call_impl = None
            elif compiled is not None:
                held = [cell.cell_contents for cell in compiled.__closure__ or ()]
                with_arguments = [one for one in held if isinstance(one, torch._dynamo.eval_frame._TorchDynamoContext)]
                if not with_arguments:
                    log.warning("%s: this torch does not tell the arguments of compile(), so the default ones are used", unit.name)
                module._compiled_call_impl = None
                module.forward = (with_arguments[0] if with_arguments else torch.compile)(module.forward)
