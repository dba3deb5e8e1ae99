"""Saved-tensor hooks: of checkpoints and the trainer around the model, of the walk around a unit's forward, and of SavedInRam around the model's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import traceback
from typing import Any, Callable, Iterator, NamedTuple

import torch
import torch.utils.checkpoint
from torch import nn

from ._units import Unit
from .checks import storage


def _follow_saved_hooks() -> Callable[[bool], Any]:
    """Counts the saved-tensor hooks that are pushed and popped, for a torch such as 2.6 that does not say which are on top."""
    autograd = torch._C._autograd
    push, pop = autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks
    pushed = threading.local()

    def push_and_count(pack: Any, unpack: Any) -> None:
        push(pack, unpack)
        pushed.hooks = [*getattr(pushed, "hooks", []), (pack, unpack)]

    def pop_and_count() -> None:
        pop()
        pushed.hooks = getattr(pushed, "hooks", [])[:-1]

    def top(ignore_is_tracing: bool) -> Any:
        hooks = getattr(pushed, "hooks", None)
        return hooks[-1] if hooks else None

    autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks = push_and_count, pop_and_count
    return top


_top_saved_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None) or _follow_saved_hooks()


def function_around() -> Any:
    """The node of the torch.autograd.Function, such as a reentrant checkpoint, whose forward runs this one. Gradients are off in it, but it
    belongs to the step. None if gradients were off around the function too, because its node then has no edges."""
    for frame, _ in itertools.islice(traceback.walk_stack(sys._getframe(1)), 60):
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount > 0 and code.co_varnames[0] != "self":
            node = frame.f_locals.get(code.co_varnames[0])
            if isinstance(node, torch.autograd.function.BackwardCFunction) and node.next_functions:
                return node
    return None


def checkpoint_around() -> bool | None:
    """Whether the checkpoint that runs this forward is reentrant; None: there is no checkpoint."""
    hooks = _top_saved_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__:
        return False
    node = None if torch.is_grad_enabled() else function_around()
    return True if node is not None and is_checkpoint(node) else None


def is_checkpoint(node: Any) -> bool:
    """Whether it is the node of a reentrant checkpoint."""
    return node.name().startswith("CheckpointFunction")


class InnerCheckpoints:
    """Finds reentrant checkpoints within the forwards of units. Their parameters are in graphs of their own, which torch's engine does not know
    before it runs them. A search goes through all nodes of a unit, so it is made until a backward has shown which units need it."""

    def __init__(self, units: int):
        self.all = self.searched = frozenset(range(units))
        self.found: set[int] = set()

    def is_below(self, node: Any, unit: int, first: int) -> bool:
        """`first`: the number of the unit's first node."""
        below, seen = [node], {node}
        while below:
            node = below.pop()
            if is_checkpoint(node):
                self.found.add(unit)
                return True
            later = {one for one, _ in node.next_functions if one is not None and one._sequence_nr() >= first} - seen
            if unit in self.searched:
                below += later
                seen |= later
            elif any(map(is_checkpoint, later)):
                return True  # of a sum with one
        return False

    def settle(self) -> None:
        """A backward with gradients has begun."""
        self.searched, self.found = frozenset(self.found), set()

    def search_again(self, could_give: bool) -> None:
        """A backward without gradients has begun. `could_give`: with checkpoints it would, which may have been switched on since the first one."""
        if could_give:
            self.searched = self.all


@contextlib.contextmanager
def without_saved_hooks() -> Iterator[None]:
    """Takes the saved-tensor hooks away meanwhile. Those of a checkpoint would count the tensors that are saved here."""
    autograd, taken = torch._C._autograd, []
    while (hooks := _top_saved_hooks(True)) is not None:
        autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _kept(saved: torch.Tensor) -> torch.Tensor:
    return saved


class _Own(NamedTuple):
    """A parameter of the unit that saves it, or a view of one."""

    tensor: torch.Tensor


def _packed(own: frozenset[int], pack: Callable[[torch.Tensor], Any], saved: torch.Tensor) -> Any:
    return _Own(saved) if own and storage(saved) in own else pack(saved)


def _restored(unpack: Callable[[Any], torch.Tensor], unpacks: Callable[[], None] | None, saved: Any) -> torch.Tensor:
    if unpacks is not None:
        unpacks()
    return saved.tensor if isinstance(saved, _Own) else unpack(saved)


class WatchedSaves:
    """Watches the tensors that units save. The trainer's own hooks around the model see them too, but not the unit's parameters: several
    units share a memory, so an address does not tell a parameter. In backward the unit shows its parameters again."""

    def __init__(self) -> None:
        self.pushed: list[tuple[nn.Module, Any]] = []  # the hooks, and the module whose forward runs under them

    def push(self, module: nn.Module, unit: Unit, unpacks: Callable[[], None] | None) -> None:
        """`unpacks`: is called before one of the tensors is unpacked."""
        outer = _top_saved_hooks(True)
        pack, unpack = outer or (_kept, _kept)
        is_pushed = bool(self.pushed) and pack is self.pushed[-1][1].pack_hook
        if not torch.is_grad_enabled() or is_pushed or (outer is None and unpacks is None):
            return
        if getattr(pack, "__module__", "") == torch.utils.checkpoint.__name__:
            return
        own = frozenset(storage(parameter) for parameter in unit.parameters) if outer else frozenset()
        hooks = torch.autograd.graph.saved_tensors_hooks(functools.partial(_packed, own, pack), functools.partial(_restored, unpack, unpacks))
        hooks.__enter__()
        self.pushed.append((module, hooks))

    def pop(self, module: nn.Module | None = None) -> None:
        """`module`: only if its forward runs under them. They stay if the forward of the module has pushed hooks of its own, which it pops first."""
        if self.pushed and (module is None or module is self.pushed[-1][0]):
            if (top := _top_saved_hooks(True)) is not None and top[0] is self.pushed[-1][1].pack_hook:
                self.pushed.pop()[1].__exit__(None, None, None)


class SavedInRam:
    """Keeps in pinned RAM what the model's forward saves for its backward, except for parameters. It has the attribute `remove` of a handle."""

    def __init__(self, model: nn.Module, units: list[Unit]):
        self.residents = [parameter for unit in units if unit.keep_whole for parameter in unit.parameters]
        self.hooks: list[Any] = []  # that are pushed now
        self.handles = [
            model.register_forward_pre_hook(self._push, prepend=True),
            model.register_forward_hook(self._pop, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _push(self, module: nn.Module, arguments: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or not torch.is_grad_enabled() or _top_saved_hooks(True) is not None:
            return  # the hooks of the trainer decide
        ram = torch.autograd.graph.save_on_cpu(pin_memory=True)
        own = frozenset(storage(parameter) for parameter in self.residents)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(_packed, own, ram.pack_hook), functools.partial(_restored, ram.unpack_hook, None)
        )
        hooks.__enter__()
        self.hooks.append(hooks)

    def _pop(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self.hooks and torch._C._current_graph_task_id() == -1:
            self.hooks.pop().__exit__(None, None, None)
