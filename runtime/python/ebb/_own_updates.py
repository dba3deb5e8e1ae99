"""Updates of an optimizer of torch's that the JSON has no name for. The engine calls them slice by slice, over its fp32 masters, gradients and
states, so that states are cut, offloaded and saved as those of its own rules are."""

from __future__ import annotations

import collections
import json
import logging
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from . import _library
from ._library import Error, Rates
from ._tensors import Memory, over
from ._units import Unit

log = logging.getLogger("ebb")
_STEPS, _SIZES = 3, (5, 7)  # of the trial; its values are updated as one tensor, and as two
Options = Mapping[str, Any]


class OwnUpdates:
    """`optimizer`: over parameters of `model`. Its groups' "lr" may change between updates. An optimizer must treat each element alone: a trial with
    random values finds out, and what its states are. Those of one number a tensor are kept once an element, except for a counter of updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module):
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        if optimizer.state:
            raise Error(f"optimizer= {self.name} has states before its first step: that is not built. Take no step before ebb.initialize", "UNIMPLEMENTED")
        self.groups = trained(optimizer)
        self.fixed = [_without_rate(group) for group in self.groups]
        self.members = members_of(self.groups, model)
        taken = {name for names in self.members.values() for name in names}
        left = next((name for name, one in model.named_parameters() if one.requires_grad and name not in taken), None)
        if left is not None:
            raise Error(f"optimizer= lacks '{left}', which is trainable: add it, or freeze it", "INVALID_ARGUMENT")
        if not taken:
            raise Error("optimizer= has nothing to train", "INVALID_ARGUMENT")
        self.states: list[str] = []  # their names, in the engine's order
        self.counters: dict[str, Any] = {}  # names of states that count updates: one of these
        self.numbers: dict[str, torch.Tensor] = {}  # names of states that are one number a tensor: one of these
        for options in self.fixed:
            self._learn(options)
        self.group_of: dict[int, int] = {}  # by the engine's number of a parameter
        self.memory: Memory | None = None
        self.device = torch.device("cpu")
        self._call = _library.UPDATE(self._update)
        self._names = (_library.c_char_p * max(len(self.states), 1))(*[name.encode() for name in self.states])

    def config(self, text: str) -> str:
        """The configuration with the groups."""
        try:
            settings = json.loads(text)
        except ValueError:
            return text  # which the library has an error for
        if settings.get("optimizer"):
            raise Error('optimizer= and the JSON\'s "optimizer" are both given: remove one of them', "INVALID_ARGUMENT")
        if settings.get("scheduler"):
            raise Error(
                f'the JSON\'s "scheduler" beside an optimizer whose own code updates, {self.name}: use a scheduler of torch over it, or, of OneCycle through '
                'DeepSpeed\'s names, "cycle_momentum": false', "UNIMPLEMENTED"
            )
        settings["optimizer"] = {"type": "SGD", "params": {"lr": float(self.groups[0]["lr"])}}  # which the engine does not use
        ebb = settings["ebb"] = dict(settings.get("ebb") or {})
        if ebb.get("parameter_groups"):
            raise Error('optimizer= has the groups of parameters: remove "ebb.parameter_groups"', "INVALID_ARGUMENT")
        ebb["parameter_groups"] = {name: {"lr_factor": 1.0} for name in self.members}  # rates() has the rates
        return json.dumps(settings)

    def options(self) -> dict[str, Any]:
        """Of _library.EngineOptions."""
        return {"update": self._call, "update_states": self._names, "update_state_count": len(self.states)}

    def attach(self, memory: Memory, device: torch.device, units: Sequence[Unit], first_id: Sequence[int]) -> None:
        """`first_id`: for each unit, the library's number of its first parameter."""
        group_of = {name: group for group, members in enumerate(self.members.values()) for name in members}
        names = {first + i: name for unit, first in zip(units, first_id) for i, name in enumerate(unit.names)}
        self.group_of = {number: group_of[name] for number, name in names.items() if name in group_of}
        self.memory, self.device = memory, device
        log.info("updates are %s's own code, over slices, with %s", self.name, f"the states {', '.join(self.states)}" if self.states else "no states")

    def rates(self) -> Rates:
        """Of the next update. Raises if a group has changed what the engine cannot change."""
        for group, fixed in zip(self.groups, self.fixed):
            now = _without_rate(group)
            changed = next((name for name in now if name in fixed and now[name] != fixed[name]), None)
            if changed is not None:
                raise Error(f"param_groups[i]['{changed}'] became {now[changed]}: between updates of {self.name} \"lr\" alone may change", "UNIMPLEMENTED")
        return [(name, float(group["lr"]), None) for name, group in zip(self.members, self.groups)]

    # One slice.

    def _update(self, user: Any, given: Any) -> int:
        try:
            of = given.contents
            if of.stream:
                with torch.cuda.stream(torch.cuda.ExternalStream(of.stream, self.device)):
                    self._update_on(of, self.device)
            else:
                self._update_on(of, torch.device("cpu"))
        except BaseException as error:  # an engine's thread has nobody to tell
            log.error("an update by %s failed: %s: %s", self.name, type(error).__name__, error)
            return 1
        return 0

    def _update_on(self, of: Any, device: torch.device) -> None:
        tensor = lambda address: over(self.memory, address, (of.end - of.begin,), torch.float32, device)
        kept = {name: tensor(of.state[k]) for k, name in enumerate(self.states)}
        options = {**self.fixed[self.group_of[of.parameter]], "lr": of.learning_rate}
        self._step(options, tensor(of.master), tensor(of.gradient), kept, of.step)

    def _step(self, options: Options, values: torch.Tensor, gradient: torch.Tensor, kept: dict[str, torch.Tensor], step: int) -> None:
        """Updates `values` and `kept`, which are the states after `step` - 1 updates."""
        piece = nn.Parameter(values)
        piece.grad = gradient
        before: dict[str, Any] = {}
        if step > 1:
            before = {name: torch.full_like(self.numbers[name], float(value[0])) if name in self.numbers else value for name, value in kept.items()}
            before.update({name: _counted(kind, step - 1) for name, kind in self.counters.items()})
        after = self._stepped(options, piece, before)
        for name, value in kept.items():
            new = after.get(name)
            if new is not None and (name in self.numbers or new.data_ptr() != value.data_ptr()):
                value.copy_(new)
        if piece.data_ptr() != values.data_ptr():
            values.copy_(piece.data)

    def _stepped(self, options: Options, piece: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        """The states after a step of the optimizer's own code over `piece` alone."""
        group = {**options, "params": [piece]}
        worker = object.__new__(type(self.optimizer))
        worker.__dict__.update({key: value for key, value in self.optimizer.__dict__.items() if key != "step"})  # a scheduler's is of the client's
        worker.state = collections.defaultdict(dict, {piece: state} if state else {})
        worker.param_groups = [group]
        worker._optimizer_step_pre_hooks, worker._optimizer_step_post_hooks = collections.OrderedDict(), collections.OrderedDict()
        with torch.no_grad():
            type(self.optimizer).step(worker)
        changed = next((key for key in options if key in group and group[key] is not options[key] and group[key] != options[key]), None)
        if changed is not None:
            raise Error(f"{self.name} changes '{changed}' of its groups in step()", "UNIMPLEMENTED")
        return worker.state[piece]

    # The trial.

    def _learn(self, options: Options) -> None:
        draw = torch.Generator().manual_seed(1)
        values = torch.randn(sum(_SIZES), generator=draw)
        gradients = torch.randn(_STEPS, sum(_SIZES), generator=draw)
        options = {**options, "lr": 0.01}
        try:
            whole = self._whole_trial(options, values.clone(), gradients)
            parts = [self._trial(options, part.clone(), of_part) for part, of_part in zip(values.split(_SIZES), gradients.split(_SIZES, 1))]
        except Exception as error:
            raise Error(f"optimizer= {self.name} cannot update slices of parameters: {type(error).__name__}: {error}", "UNIMPLEMENTED") from error
        if not torch.allclose(whole, torch.cat(parts), rtol=1e-5, atol=1e-7):
            raise Error(
                f"optimizer= {self.name}: the update of an element depends on others of its tensor, and the ranks have slices. Take an optimizer that is "
                "element-wise, or Lamb, Lars or Muon of the JSON", "UNIMPLEMENTED"
            )

    def _whole_trial(self, options: Options, values: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        """Steps of the optimizer as it is. Shows which states it has."""
        piece, state = nn.Parameter(values), {}
        seen: dict[str, list[Any]] = {}
        for gradient in gradients:
            piece.grad = gradient.clone()
            state = self._stepped(options, piece, state)
            for name, value in state.items():
                seen.setdefault(name, []).append(value.clone() if isinstance(value, torch.Tensor) else value)
        for name, of_steps in seen.items():
            if all(value is None for value in of_steps):
                continue
            if all(_is_number(value) and float(value) == step for step, value in enumerate(of_steps, 1)):
                self.counters[name] = of_steps[0]
            elif all(isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel() in (1, values.numel()) for value in of_steps):
                if of_steps[0].numel() == 1:
                    self.numbers[name] = of_steps[0]
                if name not in self.states:
                    self.states.append(name)
            else:
                raise Error(f"its state '{name}' is neither an fp32 tensor of the parameter's shape, nor one number", "UNIMPLEMENTED")
        return piece.detach()

    def _trial(self, options: Options, values: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
        kept = {name: torch.zeros_like(values) for name in self.states}
        for step, gradient in enumerate(gradients, 1):
            self._step(options, values, gradient.clone(), kept, step)
        return values


def trained(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if any(parameter.requires_grad for parameter in group["params"])]


def _without_rate(group: Options) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}


def members_of(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, list[str]]:
    """By the engine's name of a group: the names of its parameters that train."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    members: dict[str, list[str]] = {}
    for number, group in enumerate(groups):
        of_group = [parameter for parameter in group["params"] if parameter.requires_grad]
        strange = next((parameter for parameter in of_group if id(parameter) not in name_of), None)
        if strange is not None:
            raise Error(f"the optimizer has a parameter of the shape {list(strange.shape)} that is not in the model", "INVALID_ARGUMENT")
        members[f"group{number}"] = [name_of[id(parameter)] for parameter in of_group]
    return members


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or isinstance(value, torch.Tensor) and value.numel() == 1


def _counted(kind: Any, count: int) -> Any:
    return torch.full_like(kind, count) if isinstance(kind, torch.Tensor) else type(kind)(count)
