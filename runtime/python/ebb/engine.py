"""The engine of a torch module: what a training loop calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from ctypes import byref, c_double
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from . import _buffers, _library, saving
from ._blocks import local_of, set_local
from ._entries import Entries
from ._fixed import refuse_caller
from ._library import DIRECTIONS, STATES, TIERS, Error, check, library
from ._model import compute_dtype, structs_of, tier_of_activations
from ._open_steps import OpenSteps
from ._order import Call, of_evaluation, order_of, warn_of_registration
from ._reports import CommunicationRow, MemoryRow, Report, TrafficRow, memory_rows
from ._own_updates import OwnUpdates
from ._saved_tensors import SavedInRam, checkpoint_around, without_saved_hooks
from ._state import State
from ._steps import Steps
from ._tensor_faults import TensorFaults, is_torchs
from ._tensors import DTYPES, Memory, Slots, over
from ._units import Unit
from ._visits import Order
from ._walk import Walk, never_compiled
from ._world import World, memories
from .checks import check_loss
from .optimizer import Optimizer, groups_of
from .saving import Ticket


class Engine(OpenSteps):
    """Made by initialize(). Every rank makes the same calls in the same order, with one thread at a time."""

    def __init__(
        self, model: nn.Module, world: World, settings: dict[str, Any], device: torch.device, units: list[Unit], order: Order,
        is_order_known: bool, handle: int, first_id: list[int], group_of: Callable[[str], str], checks_reads: bool, own: OwnUpdates | None = None,
    ):
        """`settings`: the resolved configuration. `first_id`: for each unit, the library's number of its first parameter. `own`: of optimizer=."""
        self.model = model
        self.world = world
        self.config = settings
        self.accumulation = int(settings.get("gradient_accumulation_steps", 1))
        self.device = device
        self.units = units
        self.order = order
        self._is_order_known = is_order_known
        self._of_one_forward: Order | None = None
        self.forwards_max = 1  # of the model before one backward, in the first step; later steps may have as many as that had
        self._memory = Memory(handle)
        mesh = _library.MeshFacts()
        check(library.ebb_engine_mesh(handle, byref(mesh)))
        # Data ranks have different batches. Tensor ranks have the same batch, and blocks of the DTensors among the parameters.
        self.data_rank, self.data_ranks = mesh.data_rank, mesh.data_ranks
        self.tensor_rank, self.tensor_ranks = mesh.tensor_rank, mesh.tensor_ranks
        self._slots = [Slots(self._memory, unit.names, unit.parameters, unit.keep_whole) for unit in units]
        self._place()
        half = compute_dtype(settings) == torch.float16  # a parameter that keeps fp16 beside another type has no loss scale
        trainable = [(name, one) for unit in units for name, one in zip(unit.names, unit.parameters) if one.requires_grad]
        schedule, self.optimizer, rates = settings.get("scheduler", {}).get("type") or "", None, list
        if own is not None:
            own.attach(self._memory, device, units, first_id)
            self.optimizer, rates = own.optimizer, own.rates
        elif trainable:
            scheduled = self._scheduled_rate if schedule else None
            self.optimizer = Optimizer(groups_of(trainable, group_of, settings), self.step, self.zero_grad, scheduled, schedule)
            rates = self.optimizer.rates
        faults = TensorFaults(self._memory, world.rank, mesh) if self.tensor_ranks > 1 else None
        self._steps = Steps(
            self._memory, units, self._slots, first_id, order, device, half, rates, self.accumulation, world.size, self.data_ranks, faults
        )
        self._walk = Walk(model, units, self._steps)
        self._walk.expect(order)
        self._walk.attach()
        self._state = State(model, world, self._memory, units, first_id, self._steps, self._walk)
        self._steps.refresh()
        self._aliases = {alias: one._ebb_name for alias, one in model.named_parameters(remove_duplicate=False)}
        self._finished = 0
        self._entries = Entries(self._state)
        self._handles = saving.attach(self._entries, self.zero_grad) + self._steps.handles
        self._handles.append(model.register_forward_pre_hook(never_compiled(self._see_first_batch), prepend=True, with_kwargs=True))
        self._handles.append(model.register_forward_pre_hook(never_compiled(self._check_model), prepend=True))
        if device.type == "cuda" and tier_of_activations(settings) == "cpu":
            self._handles.append(SavedInRam(model, units))
        self._checks_reads = checks_reads
        model.__dict__["_ebb_engine"] = weakref.ref(self)
        memories.add(self._memory)

    # One step.

    def backward(self, loss: torch.Tensor) -> None:
        """The backward of one micro-batch. `loss`: a scalar, the mean over this rank's samples. It is counted for report().loss, and
        with fp16 multiplied by the loss scale. Do not divide it, because gradients are averaged over ranks and micro-batches.

        Without fp16, loss.backward() does the same, but report().loss is then 0."""
        self._state.check()
        check_loss(loss)
        if not self._steps.in_step:
            raise Error("backward() without a forward of the model with gradients since the last step()")
        self._walk.check_whole()
        self._walk.settle()
        self._steps.finish_evaluation()
        self._steps.add_loss(loss)
        try:
            self._steps.scaled_backward(loss)
        except BaseException as error:
            text = self._walk.fail(error)
            if is_torchs(f"{type(error).__name__}: {error}"):
                raise Error(text, "ABORTED") from error
            raise

    def step(self, now: bool = False) -> bool:
        """Ends a micro-batch, which is one backward. The last of gradient_accumulation_steps micro-batches ends the step and updates
        the parameters. Returns whether the step has ended. Raises if there was no backward since the last call.

        now: ends the step with the micro-batches so far, and takes their mean. This is for the last, incomplete step of an epoch. It is
        an error if updates are early, which means under backward ("ebb.asynchronous_step").

        An error of any rank is raised on every rank, by this call or by report(). The step is then dropped."""
        self._state.check()
        if callable(now):
            raise Error("step(closure) is not supported: call backward() before step()", "UNIMPLEMENTED")
        self._walk.check_whole()
        if self._walk.backward is not None:
            error = Error("step() after a backward that ended with an error: call drop() to go on")
            self._walk.fail(error)
            raise error
        self._walk.settle()
        steps = self._steps
        with self._failing_step():
            self._state.members.check()
            steps.check_writes()
        if not steps.in_step:
            raise Error("step() without a forward of the model with gradients since the last one")
        if steps.backwards == 0 or (steps.backwards == steps.counted and not now and not steps.is_reduced):
            raise Error(
                "step() without a backward through the model since the last one. If a forward's backward was left out, call drop() instead of that "
                "backward. If reentrant checkpoints were switched on since the first step, call drop() and repeat the step: they are found then"
            )
        with self._failing_step():
            self._walk.finish_round()
            steps.check_gradients(has_new=steps.backwards > steps.counted)
        steps.counted = steps.backwards
        if steps.counted < self.accumulation and not now:
            return False
        scale = steps.scale_of_sums() if steps.begun_with_sums else self.accumulation / steps.counted
        try:
            steps.finish(scale)
        finally:
            self._walk.forget()
        self._finished += 1
        self._settle_order()
        if self.optimizer is not None:
            self.optimizer._opt_called = True  # torch's schedulers warn without it
        if self._finished == 2:
            self._walk.watch_less()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets `.grad` of the parameters to None. Drops the step if it has only gradients that no step() has counted, such as those of another
        model's loss. Micro-batches that step() has counted stay, and so does a forward that has had no backward yet."""
        self._state.check()
        steps = self._steps
        if not steps.in_step or steps.backwards == steps.counted:
            steps.clear_gradients()
        elif steps.counted == 0:
            self.drop()
        else:
            raise Error(
                f"zero_grad() between a backward and its step(), after {steps.counted} micro-batch(es) of the step: one backward cannot be taken "
                "back alone. drop() drops the whole step"
            )

    def report(self) -> Report:
        """The numbers of the last finished step. Waits for that step, and raises its error if it had one."""
        self._state.check()
        row = _library.StepReport()
        check(library.ebb_step_report(self._memory.handle, byref(row)))
        return Report(row.step, bool(row.applied), row.skipped_steps, row.loss, row.gradient_norm, row.loss_scale, row.learning_rate)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group in the next step. Setting it sets the rate of all groups, from the next step on, and ends the
        JSON's schedule. With such a schedule, reading it waits for the last step's verdict."""
        return self.param_groups[0]["lr"]

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups like those of torch's optimizers: "lr", "weight_decay", "params", and "group", which is the name in the configuration."""
        return self.optimizer.param_groups if self.optimizer is not None else []

    @property
    def sums_micro_batches(self) -> bool:
        """False: gradients and report().loss are means over the micro-batches of a step. True: they are sums, for a loop that divides
        each loss itself, for example by the tokens of all micro-batches. Over ranks they are means in both cases. A change holds from
        the next step on."""
        return self._steps.sums

    @sums_micro_batches.setter
    def sums_micro_batches(self, sums: bool) -> None:
        self._steps.sums = sums

    # State.

    def gather(self, name: str, rank: int = -1, master: bool = False, state: str = "") -> torch.Tensor | None:
        """Collective: returns the whole value of a parameter on the CPU, in its dtype. With `master`: the fp32 value that the optimizer
        updates. Only `rank` gets the value, and other ranks get None; -1: every rank gets it.

        state: an optimizer state by its name, such as "exp_avg", in fp32. "gradient": the fp32 gradient of the step, averaged over ranks and
        micro-batches, and neither scaled nor clipped, between the step's last backward and step(), with `reads_gradients`."""
        self._state.between_forwards(checks_writes=False)
        return self._state.gather(self._named(name), rank, master, state)

    def gather_pieces(self, name: str, piece: Callable[[Any, int, int], None], rank: int) -> None:
        """Collective: gather() without a whole value anywhere, as State.gather_pieces()."""
        self._state.gather_pieces(name, piece, rank)

    def slices_of_masters(self, groups: Iterable[Iterable[str]]) -> list[torch.Tensor]:
        """Copies of this rank's fp32 slices, flat: for each group of parameters' names one tensor, which cannot be written to."""
        return self._state.slices_of_masters([map(self._named, names) for names in groups])

    def lend(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Collective, between forwards: the parameters show whole values, which the caller may change, until take_back(). Returns copies of them. The
        engine does not see a change: write() sets it."""
        return self._state.lend([self._named(name) for name in names])

    def take_back(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Ends lend(). Returns the values that the parameters have shown."""
        return self._state.take_back([self._named(name) for name in names])

    def state_dict(self, rank: int = -1) -> dict[str, torch.Tensor]:
        """Collective: all entries of model.state_dict(), with parameters gathered to the CPU of `rank`; -1: to the CPU of every rank.
        Other ranks get an empty dict."""
        self._state.between_forwards()
        return self._entries.of_values(rank)

    def names_of_entries(self) -> dict[str, str]:
        """Collective: for each parameter in model.state_dict(), its name in checkpoints. A tied one has several entries."""
        self._state.between_forwards()
        return {key: str(one._ebb_name) for key, one in self._entries.of_names().items() if isinstance(one, nn.Parameter)}

    def load_state_dict(self, values: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Collective: sets values by the names of model.state_dict(). Every rank gives the same values. Optimizer states do not change."""
        saving.load_state_dict(self._entries, values, strict)

    def write(self, name: str, value: torch.Tensor, state: str = "") -> None:
        """Collective, between steps: sets one parameter to `value`, which must have its shape and be the same on every rank. `state`: as of
        gather()."""
        self.write_all({name: value}, state)

    def write_all(self, values: Mapping[str, torch.Tensor], state: str = "") -> None:
        self._state.between_forwards()
        self._state.write({self._named(name): value for name, value in values.items()}, state)

    def save(
        self, folder: str | os.PathLike, *, keep: int = 0, trainer: bytes = b"", of_this_rank: bytes = b"", asynchronous: bool = False
    ) -> Ticket | None:
        """Collective: saves the run as the checkpoint `folder`/step-N, which load() takes at any number of ranks, stage and tier. It has
        the persistent buffers of each rank's model. Only the newest `keep` checkpoints are kept; 0: all. `trainer`: the caller's own bytes;
        those of rank 0 are saved. `of_this_rank`: bytes of each rank.

        asynchronous: returns a Ticket as soon as the save has been started. It goes on while later steps run, and saves the state after
        the last finished step. A second save waits for the first."""
        self._state.between_steps("save")
        buffers = _buffers.packed(self._entries)
        options = _library.SaveOptions(
            keep=keep, trainer=trainer, trainer_bytes=len(trainer), of_this_rank=of_this_rank, of_this_rank_bytes=len(of_this_rank),
            buffers=buffers, buffers_bytes=len(buffers),
        )
        number = ctypes.c_int64()
        of_ticket = byref(number) if asynchronous else None
        check(library.ebb_save(self._memory.handle, os.fspath(folder).encode(), byref(options), of_ticket))
        return Ticket(self._memory, number.value) if asynchronous else None

    def load(self, path: str | os.PathLike, *, states: bool = True, partial: bool = False) -> tuple[int, bytes, bytes]:
        """Collective: loads a checkpoint, or the newest complete one of a folder, or a universal checkpoint of DeepSpeed's. Returns the number of
        finished steps, and the bytes that save() got as `trainer` and as `of_this_rank` (empty at another number of ranks).

        states: False: values of parameters alone. Optimizer states, the loss scale and the number of steps stay.
        partial: what the checkpoint lacks stays as it is, and what the model lacks is left out. Otherwise both are errors."""
        self._state.between_steps("load")
        if os.path.isdir(os.path.join(path, "zero")):
            return saving.load_universal(self, path, states=states, partial=partial)
        self._steps.whole.hide()
        found, options = _library.Loaded(), _library.LoadOptions(without_states=not states, partial=partial)
        check(library.ebb_load_with(self._memory.handle, os.fspath(path).encode(), byref(options), byref(found)))
        self._steps.refresh()
        _buffers.set_to(self._entries, ctypes.string_at(found.buffers, found.buffers_bytes))
        of_this_rank = ctypes.string_at(found.of_this_rank, found.of_this_rank_bytes)
        return found.step, ctypes.string_at(found.trainer, found.trainer_bytes), of_this_rank

    def save_pretrained(
        self, folder: str | os.PathLike, *, trainable_only: bool = False, dtype: torch.dtype | None = None, file_bytes: int = 5_000_000_000
    ) -> None:
        """Collective: writes the model as safetensors files of at most `file_bytes` and their index, with the config.json of transformers
        or peft if the model has one. Rank 0 writes, and no rank holds the whole model. `trainable_only`: writes a peft model's adapter,
        under peft's names. `dtype`: of the values; default: that of the parameters."""
        self._state.between_forwards()
        saving.save_pretrained(self._entries, Path(folder), trainable_only, dtype, file_bytes)

    def copy_parameters_from(self, other: "Engine") -> None:
        """Collective: every parameter takes the value of the parameter of `other` that has the same name and shape."""
        self._state.between_steps("copy_parameters_from")
        other._state.between_steps("copy_parameters_from")
        self._steps.whole.hide()
        check(library.ebb_engine_copy_parameters(self._memory.handle, other._memory.handle))
        self._steps.refresh()

    def reorder(self, example: Any) -> None:
        """Collective, between steps: learns the order of the units again from `example`, which is as for initialize(). Call it if the loop
        begins to call the model in another way."""
        self._state.between_steps("reorder")
        self._adopt(self._observed(example))

    # Memory.

    def memory(self) -> list[MemoryRow]:
        """Bytes of this rank: predicted, current and peak. Activations and buffers are torch's, so they are not counted."""
        self._state.check()
        return memory_rows(library.ebb_memory, self._memory.handle)

    def traffic(self) -> list[TrafficRow]:
        """The bytes that the last finished step moved between tiers. Empty if all state is on the device."""
        self._state.check()
        rows = _library.rows_of(_library.TrafficRow, library.ebb_traffic, self._memory.handle)
        return [TrafficRow(STATES[row.state], TIERS[row.tier], DIRECTIONS[row.direction], row.predicted, row.bytes) for row in rows]

    def communication(self) -> list[CommunicationRow]:
        """The bytes that the last finished step's collectives moved between ranks."""
        self._state.check()
        rows = _library.rows_of(_library.CommunicationRow, library.ebb_communication, self._memory.handle)
        return [CommunicationRow(row.operation.decode(), row.predicted, row.bytes) for row in rows]

    def suspend(self) -> None:
        """Collective, between steps: frees the device's memory and keeps the state on the host, until resume(). Meanwhile parameters have
        no values, but state can be read and written."""
        self._state.between_steps("suspend")
        self._steps.whole.hide()
        for slots in self._slots:
            slots.conceal()
            slots.views = []
        self._steps.forget_addresses()
        check(library.ebb_engine_suspend(self._memory.handle, 1))

    @property
    def is_suspended(self) -> bool:
        return self._state.is_suspended

    def resume(self) -> None:
        """Collective: takes the device's memory again after suspend(). Training goes on bit for bit."""
        self._state.between_steps("resume")
        check(library.ebb_engine_suspend(self._memory.handle, 0))
        self._place()
        self._steps.refresh()

    def close(self, keep_values: bool = False) -> None:
        """Ends the engine's threads and files, and removes the hooks from the model. After this the parameters have no values, and reading one
        is an error. Tensors over the engine's memory remain readable.

        keep_values: the model gets its values back, whole or a tensor rank's blocks, in the dtypes of its parameters and on the engine's device. This is collective,
        between steps. If a rank lacks the memory for them, that is an error on all ranks and the engine stays open."""
        if self._memory.closed:
            return
        values = self._state.whole_values(self.device) if keep_values else {}
        self._walk.forget()
        self._walk.detach()
        for handle in self._handles:
            handle.remove()
        self._memory.close()
        for slots in self._slots:
            slots.conceal()
        for name, parameter in self._state.parameters.items():
            parameter._ebb_name, parameter._ebb_closed = None, name
            if name in values:
                set_local(parameter, values[name])
        self.model.__dict__.pop("_ebb_engine", None)
        memories.discard(self._memory)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not self._memory.closed:
            self._walk.fail(error)
        self.close()

    # Inside.

    @contextlib.contextmanager
    def _failing_step(self) -> Iterator[None]:
        """An error within it, perhaps of this rank alone, fails the step on every rank."""
        try:
            yield
        except Error as error:
            self._walk.forget()
            self._steps.fail(str(error))
            raise

    def _scheduled_rate(self, group: str) -> float | None:
        """Of the next step, after the verdict on the last one."""
        if self._memory.closed:
            return None
        rate = c_double()
        check(library.ebb_scheduled_rate(self._memory.handle, group.encode(), byref(rate)))
        return rate.value

    def _named(self, name: str) -> str:
        found = self._aliases.get(name)
        if found is None:  # torch's state_dict() may have other names than named_parameters()
            found = getattr(self._entries.of_names().get(name), "_ebb_name", None)
        if found is None:
            raise Error(f"the model has no parameter '{name}'", "NOT_FOUND")
        return found

    def _check_model(self, module: nn.Module, arguments: tuple) -> None:
        if torch._C._current_graph_task_id() == -1 and not self._walk.is_paused:
            self._steps.has_failed = False
            refuse_caller()
            self._state.members.check()
            self._entries.check_writes()

    def _see_first_batch(self, module: nn.Module, arguments: tuple, keywords: dict) -> None:
        if self._is_order_known or torch._C._current_graph_task_id() != -1 or self._steps.in_step:
            return
        is_reentrant = checkpoint_around()
        if not torch.is_grad_enabled() and not is_reentrant:
            return
        self._is_order_known = True
        self._of_one_forward = self._observed(Call(arguments, keywords, is_reentrant))
        order = self._of_one_forward.repeated(self.forwards_max, self.units)
        if order.outside and not self._checks_reads:  # with check=True the forward that follows also names the operator and the line
            error = Error(f"'{order.outside[0]}' is used outside of its module: name it in resident=, or give initialize this batch, example=")
            error.outside = order.outside
            raise error
        # With several ranks it is always called: reorder() compares the orders of all ranks, and names a difference.
        if self.world.size > 1 or order.seen and (order.visits, order.events) != (self.order.visits, self.order.events):
            self._state.between_steps("reorder")
            self._adopt(order)

    def _observed(self, example: Any) -> Order:
        self._walk.settle()
        self._walk.is_paused = True  # not detached: torch may be calling the model's hooks now, and would call detached ones too
        try:
            with without_saved_hooks():
                order = order_of(self.model, self.units, example, self.device, is_whole=False)
        finally:
            self._walk.is_paused = False
        self._walk.attach_units()
        return order if order.seen else self._evaluated(example, order)

    def _evaluated(self, example: Any, registered: Order) -> Order:
        """For a model that does not run with fake tensors: the order of its units in an evaluation, or else that of registration."""
        try:
            self._steps.finish_evaluation()
            return of_evaluation(self.model, self.units, example, lambda: self._steps.walked)
        except Error:
            raise
        except Exception as failure:
            warn_of_registration(f"{type(failure).__name__}: {failure}")
            return registered
        finally:
            self._walk.settle()
            self._steps.finish_evaluation()

    def _settle_order(self) -> None:
        """After the first step: the order has as many forwards before a backward as that step had."""
        order, self._of_one_forward = self._of_one_forward, None
        if order is not None and self.forwards_max > 1 and 0 < self._walk.most_calls != self.forwards_max:
            self.forwards_max = self._walk.most_calls
            self._adopt(order.repeated(self.forwards_max, self.units))

    def _adopt(self, order: Order) -> None:
        visits, events = structs_of(order)
        self._steps.whole.hide()
        check(library.ebb_engine_reorder(self._memory.handle, visits, len(visits), events, len(events)))
        self.order = order
        self._steps.adopt(order)
        self._walk.expect(order)
        self._place()
        self._steps.refresh()

    def _place(self) -> None:
        for unit, slots in zip(self.units, self._slots):
            rows = _library.rows_of(_library.View, library.ebb_engine_views, self._memory.handle, unit.index)
            slots.place([
                over(self._memory, row.data, local_of(parameter).shape, DTYPES[row.dtype], self.device) for row, parameter in zip(rows, unit.parameters)
            ])
