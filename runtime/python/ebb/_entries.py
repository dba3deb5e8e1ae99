"""The entries of torch's own state_dict(), with its hooks and with each module's own code, for a model whose parameters are hidden."""

from __future__ import annotations

import contextlib
import types
import weakref
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from ._blocks import is_dtensor, local_of, set_local
from ._fixed import refuse_added
from ._hidden import as_shown, has_value, is_of_no_value, without_value
from ._library import Error
from ._state import State

Values = dict[str, Any]  # of a state_dict: tensors, and what get_extra_state() gives


def name_of(parameter: nn.Parameter, key: str) -> str:
    """The engine's name of a parameter that the model has as `key`."""
    name = getattr(parameter, "_ebb_name", None)
    if name is None:
        refuse_added(key, parameter)
    return name


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {key: parameter for key, parameter in module._parameters.items() if parameter is not None}


@contextlib.contextmanager
def _stood_in(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it parameters without values are 0, for hooks that compute with what is not used."""
    parameters = list(parameters)
    with as_shown(parameters):
        for parameter in parameters:
            if not has_value(parameter):
                set_local(parameter, torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(local_of(parameter).shape))
        yield


def _set_whole(module: nn.Module, key: str, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """The module's parameter has the whole value. In the place of a DTensor, which has a block, comes another parameter."""
    if is_dtensor(parameter):
        module._parameters[key] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    else:
        parameter.data = value


def _overrides(module: nn.Module, *names: str) -> bool:
    return any(getattr(type(module), name, None) is not getattr(nn.Module, name) for name in names)


def has_own_code(module: nn.Module) -> bool:
    """Whether the module gives entries beside its parameters and buffers."""
    return _overrides(module, "_save_to_state_dict", "get_extra_state")


class Entries:
    """Replaces methods of the modules, so that torch's state_dict() and load_state_dict() meet whole values, which are gathered for one module
    at a time. Every call that gathers is collective."""

    def __init__(self, state: State):
        self.state = state
        self.rank = -1  # which rank gets gathered values; -1: all
        self.only_names = False  # parameters stand for their values
        self.gathered: dict[str, torch.Tensor | None] | None = None  # in a state_dict() of the whole model; two keys may have one parameter
        self.made: list[Any] = []  # what a module's own code has made, in a state_dict() of names
        self.received: dict[str, torch.Tensor] | None = None  # in a load_state_dict() of the whole model
        self.key_of: dict[str, str] = {}
        self.completes = False  # a module's own code gets its parameters beside the entries that are loaded
        self.of_engine = False  # a state_dict() that the engine itself asks for
        self.given: list[tuple[Any, int, str]] = []  # values of model.state_dict(): weak references, versions and keys
        self.undo: list[Callable[[], Any]] = []
        for module in state.model.modules():
            if module._parameters or has_own_code(module):
                self._replace(module, "_save_to_state_dict", self._save)
            if module._parameters:
                self._replace(module, "_load_from_state_dict", self._load)
            if module._parameters and (_overrides(module, "state_dict") or module._state_dict_pre_hooks):
                self._replace(module, "state_dict", self._save_whole)
        self._replace(state.model, "state_dict", self._of_model)

    def remove(self) -> None:
        for undo in reversed(self.undo):
            undo()

    def _replace(self, module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        """A copy of the module has the bound method of the copy, as copies of methods do."""
        earlier = module.__dict__.get(name)

        def replaced(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            own = earlier or types.MethodType(getattr(type(module), name), module)
            return call(module, own, *arguments, **keywords)

        module.__dict__[name] = types.MethodType(replaced, module)
        self.undo.append(lambda: module.__dict__.pop(name) if earlier is None else module.__dict__.update({name: earlier}))

    # Out of the model.

    def of_names(self) -> Values:
        """The entries of model.state_dict(), with parameters in place of their values. It gathers what a module's own code computes with."""
        self.only_names, self.made, self.of_engine = True, [], True
        try:
            with _stood_in(self.state.model.parameters()):
                entries = self.state.model.state_dict(keep_vars=True)
            known = {id(value) for value in (*self.made, *self.state.model.parameters(), *self.state.model.buffers())}
        finally:
            self.only_names, self.made, self.of_engine = False, [], False
        by_hooks = [key for key, value in entries.items() if isinstance(value, torch.Tensor) and id(value) not in known]
        if by_hooks:  # of a module around others: what it has computed with is not known
            whole = self.of_values(rank=0)
            entries.update({key: whole[key] for key in by_hooks if key in whole})
        for key, value in entries.items():
            if isinstance(value, nn.Parameter) and id(value) in known:
                name_of(value, key)
        return entries

    def of_values(self, rank: int) -> Values:
        """model.state_dict() on the CPU of `rank`, or of every rank (-1). Other ranks get an empty one."""
        self.rank = rank
        is_here = rank in (-1, self.state.world.rank)
        try:
            self.of_engine = True
            with _stood_in([] if is_here else self.state.model.parameters()):
                values = self.state.model.state_dict()
        finally:
            self.rank, self.of_engine = -1, False
        if not is_here:
            values.clear()
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                values[key] = value.detach().cpu()
        return values

    def _of_model(self, model: nn.Module, own: Any, *arguments: Any, **keywords: Any) -> Any:
        self.gathered = {}
        try:
            values = own(*arguments, **keywords)
            if not self.of_engine:
                gathered = set(map(id, self.gathered.values()))
                self.given += [(weakref.ref(value), value._version, key) for key, value in values.items() if id(value) in gathered]
            return values
        finally:
            self.gathered = None

    def check_writes(self) -> None:
        """Raises if the trainer's own code has written to a value of model.state_dict(), which with torch would change the model."""
        given, self.given = self.given, []
        for value, version, key in given:
            tensor = value()
            if tensor is not None:
                if tensor._version != version:
                    raise Error(
                        f"'{key}' of model.state_dict() was written to, but it is a copy of the parameter: set parameters with "
                        "model.load_state_dict() or engine.write(), and take values that you change from engine.state_dict()"
                    )
                self.given.append((value, version, key))

    def _gather(self, name: str) -> torch.Tensor | None:
        if self.gathered is None:
            return self.state.gather(name, self.rank)
        if name not in self.gathered:
            value = self.state.gather(name, self.rank)
            if self.only_names:
                return value  # of one module at a time
            self.gathered[name] = value
        return self.gathered[name]

    @contextlib.contextmanager
    def _shown(self, module: nn.Module, prefix: str) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters have their whole values: on their own device, where a module's own code computes with them. If one rank alone gathers,
        those of the other ranks stay hidden. Yields the values on the CPU."""
        parameters = _parameters(module)
        values = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_shown(parameters.values()))
            stack.callback(module._parameters.update, parameters)
            for key, parameter in parameters.items():
                value = self._gather(name_of(parameter, prefix + key))
                if value is not None:
                    values[key] = value
                    _set_whole(module, key, parameter, value.to(parameter.device))
            yield values

    def _save_whole(self, module: nn.Module, own: Any, *arguments: Any, **keywords: Any) -> Any:
        with self._shown(module, keywords.get("prefix", "")):
            return own(*arguments, **keywords)

    def _save(self, module: nn.Module, own: Any, destination: Values, prefix: str, keep_vars: bool) -> None:
        parameters = _parameters(module)
        if self.only_names:
            size = len(destination)
            if not self._gives_parameters(parameters, own, destination, prefix):
                with self._shown(module, prefix):
                    own(destination, prefix, keep_vars)
                    self._put(parameters, _parameters(module), destination, prefix)
            if has_own_code(module):
                self.made += list(destination.values())[size:]
            return
        with self._shown(module, prefix) as values:
            own(destination, prefix, keep_vars)
            self._put(values, _parameters(module), destination, prefix)

    @staticmethod
    def _gives_parameters(parameters: dict[str, nn.Parameter], own: Any, destination: Values, prefix: str) -> bool:
        """Calls `own`, and returns whether it has given parameters as they are, and so needs no values."""
        size = len(destination)
        try:
            with as_shown(parameters.values()):
                for key, parameter in parameters.items():
                    set_local(parameter, without_value(local_of(parameter).shape, parameter.dtype, parameter.device, prefix + key))
                own(destination, prefix, True)
        except RuntimeError as error:
            if not is_of_no_value(error):
                raise
            return False
        given = list(destination.values())[size:]
        return all(has_value(one) for one in given if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter))

    @staticmethod
    def _put(values: Mapping[str, torch.Tensor], parameters: dict[str, nn.Parameter], destination: Values, prefix: str) -> None:
        """Puts `values` in the place of entries that are the parameters."""
        for key, value in values.items():
            entry, parameter = destination.get(prefix + key), parameters[key]
            if isinstance(entry, torch.Tensor) and entry.layout == torch.strided and entry.is_set_to(parameter):
                destination[prefix + key] = value

    # Into the model.

    def load(self, values: Mapping[str, Any], completes: bool = False) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
        """Loads what is not a parameter. Returns the parameters' values by the engine's names, and the keys that are missing and unexpected.
        `completes`: `values` has no parameters, which a module's own code gets beside them."""
        for key, buffer in self.state.model.named_buffers():
            given = values.get(key)
            if isinstance(given, torch.Tensor) and given.shape != buffer.shape:
                raise Error(f"buffer '{key}' has the shape {list(buffer.shape)}, and was given {list(given.shape)}", "INVALID_ARGUMENT")
        self.received, self.key_of, self.completes = {}, {}, completes
        try:
            missing, unexpected = type(self.state.model).load_state_dict(self.state.model, values, strict=False)
            received = self.received
        except Error:
            raise
        except RuntimeError as error:  # torch's list of shapes that differ
            raise Error(f"load_state_dict: {error}", "INVALID_ARGUMENT") from None
        finally:
            self.received, self.key_of, self.completes = None, {}, False
        if unexpected:  # a module may give state that it does not take, as bitsandbytes does; the same again is no loss
            entries = self.of_names()
            unexpected = [key for key in unexpected if not (key in entries and _are_equal(entries[key], values[key]))]
        return received, list(missing), list(unexpected)

    def _load(self, module: nn.Module, own: Any, given: Values, prefix: str, metadata: Any, strict: bool, missing: list, unexpected: list,
              errors: list) -> None:
        is_own = _overrides(module, "_load_from_state_dict") or bool(module._load_state_dict_pre_hooks)
        parameters = _parameters(module)
        before: dict[str, torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_shown(parameters.values()))
            stack.callback(module._parameters.update, parameters)
            for key, parameter in parameters.items():
                name = name_of(parameter, prefix + key)
                if given.get(prefix + key) is parameter:
                    raise Error(f"load_state_dict: '{name}' is given the model's own parameter, which has no value here: give what state_dict() has given")
                if is_own:
                    before[key] = self.state.gather(name)
                    _set_whole(module, key, parameter, before[key].to(parameter.device, copy=True))
                    if self.completes:
                        given.setdefault(prefix + key, before[key])
                elif prefix + key in given:
                    _set_whole(module, key, parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"))
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(parameter))
            own(given, prefix, metadata, strict, missing, unexpected, errors)
            self._load_quant_states(module, parameters, given, prefix, unexpected)
            received = {}
            for key, parameter in parameters.items():
                value, entry = module._parameters[key].detach(), given.get(prefix + key)
                if isinstance(entry, torch.Tensor) and entry.shape == value.shape and torch.equal(entry.detach().to(value), value):
                    received[key] = entry.detach()  # it may have more digits than the parameter
                elif not torch.equal(value.cpu(), before[key]) if is_own else prefix + key in given:
                    received[key] = value
        if self.completes:
            return
        for key, value in received.items():
            self._receive(parameters[key]._ebb_name, prefix + key, value)

    def _receive(self, name: str, key: str, value: torch.Tensor) -> None:
        if self.received is None:  # load_state_dict() of a part of the model
            self.state.between_forwards()
            self.state.write({name: value})
            return
        first = self.key_of.setdefault(name, key)
        other = self.received.setdefault(name, value)
        if other.data_ptr() != value.data_ptr() and not torch.equal(other.cpu().float(), value.cpu().float()):
            raise Error(f"load_state_dict: '{first}' and '{key}' are one parameter, and were given different values", "INVALID_ARGUMENT")

    @staticmethod
    def _load_quant_states(module: nn.Module, parameters: dict[str, nn.Parameter], given: Values, prefix: str, unexpected: list) -> None:
        """bitsandbytes saves the state of a 4-bit weight beside the weight, but its modules do not load it."""
        for key, parameter in parameters.items():
            state = getattr(parameter, "quant_state", None)
            saved = {name: given[name] for name in given if name.startswith(f"{prefix}{key}.")}
            if state is None or not saved or not hasattr(state, "from_dict"):
                continue
            parameter.quant_state = type(state).from_dict({name[len(prefix) :]: value for name, value in saved.items()}, state.absmax.device)
            if getattr(module, "quant_state", None) is not None:
                module.quant_state = parameter.quant_state
            unexpected[:] = [name for name in unexpected if name not in saved]


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.detach().cpu(), other.detach().cpu())
    return type(one) is type(other) and bool(one == other)
