"""The uses of units in a round, a forward and its backward: as they are declared, and as a walk meets them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Sequence

import torch

from ._library import BACKWARD, FORWARD
from ._units import Unit

_sequence_number = torch.autograd._get_sequence_nr


@dataclass
class Declared:
    unit: int
    forward: bool = True
    backward: bool = True
    gradients: bool = True
    trains: bool = True  # else its forward ran without gradients


@dataclass
class Order:
    visits: list[Declared]
    events: list[tuple[int, int, int]] = field(default_factory=list)  # opens, kind, visit; none: the visits in turn
    seen: bool = False  # else it is that of registration
    outside: list[str] = field(default_factory=list)  # parameters that were used outside of their unit

    def taking_visits(self, units: int) -> list[int]:
        """For each unit the visit that takes gradients. Autograd gives them once, in the last backward."""
        taking, counts = [0] * units, [0] * units
        for visit in self.visits:
            if visit.gradients and visit.backward:
                taking[visit.unit] = counts[visit.unit]
            counts[visit.unit] += 1
        return taking

    def places_in_backward(self) -> list[int]:
        """For each visit when its backward comes, counted over backwards."""
        events = self.events or in_turn(self.visits)
        of_visit = {visit: place for place, visit in enumerate(visit for opens, kind, visit in events if opens and kind == BACKWARD)}
        return [of_visit.get(number, -1) for number in range(len(self.visits))]

    def repeated(self, passes: int, units: list[Unit]) -> "Order":
        """That of several forwards before one backward, which goes through them from the last to the first. Residents are visited once."""
        if passes == 1:
            return self
        events = self.events or in_turn(self.visits)
        turn = next((i for i, (_, kind, _) in enumerate(events) if kind != FORWARD), len(events))
        again = [number for number, visit in enumerate(self.visits) if not units[visit.unit].keep_whole]
        visits, forwards, backwards = list(self.visits), list(events[:turn]), list(events[turn:])
        for _ in range(1, passes):
            number_of = {number: len(visits) + at for at, number in enumerate(again)}
            visits += [replace(self.visits[number], gradients=False) for number in again]  # those of the first forward come last
            renumbered = [(opens, kind, number_of[number]) for opens, kind, number in events if number in number_of]
            here = sum(number in number_of for _, _, number in events[:turn])
            forwards += renumbered[:here]
            backwards = renumbered[here:] + backwards
        return Order(visits, forwards + backwards, self.seen, self.outside)


def in_turn(visits: list[Declared]) -> list[tuple[int, int, int]]:
    events = [(opens, FORWARD, number) for number in range(len(visits)) for opens in (1, 0)]
    backward = [number for number in reversed(range(len(visits))) if visits[number].backward]
    return events + [(opens, BACKWARD, number) for number in backward for opens in (1, 0)]


class Expected:
    """The visits of an Order, and how many of them have come in a round."""

    def __init__(self, order: Order, units: Sequence[Unit]):
        self.visits = order.visits
        self.units = [visit.unit for visit in order.visits]
        self.places_in_backward = order.places_in_backward()
        several = {unit for unit in self.units if self.units.count(unit) > 1 and not units[unit].keep_whole}
        self.takes = [visit.gradients and visit.backward and visit.unit in several for visit in order.visits]  # of several of its unit
        self.next = 0

    def of(self, unit: Unit) -> int | None:
        """The next visit of the unit."""
        return next((at for at in range(self.next, len(self.units)) if self.units[at] == unit.index), None)

    def has_one_without_gradients(self, unit: Unit) -> bool:
        """Whether the unit's next forward is one without gradients, such as a reference's. Nothing is known without an order."""
        at = self.of(unit)
        return not self.visits or (at is not None and not self.visits[at].trains)


class Visit:
    """One use of a unit in a round: a forward, and the backward that belongs to it."""

    __slots__ = ("unit", "number", "round", "call", "place", "first_node", "trains", "is_repeated", "is_spent")

    def __init__(self, unit: Unit, number: int, round_number: int, call: int = 0):
        self.unit = unit
        self.number = number  # of this unit's uses in the round
        self.round = round_number
        self.call = call  # of the model
        self.place = -1  # in the declared order of backwards; -1: not declared
        self.first_node = _sequence_number()
        self.trains = True  # else its forward runs without gradients
        self.is_repeated = False  # in backward, by the node of a function that has run several visits
        self.is_spent = False  # a backward without gradients has gone through this call, and no other has come yet


class Scopes(Protocol):
    """The scopes that a walk opens and closes: an engine's, or a record of them, which inherits what it need not note."""

    def begin(self, trains: bool) -> None: ...
    def open(self, kind: int, visit: Visit) -> Any: ...
    def close(self, kind: int, visit: Visit, scope: Any) -> None: ...
    def backward_begins(self) -> None: ...
    def backward_ends(self, is_one_left_out: bool) -> None: ...
    def leave_round(self) -> None: ...
    def fail(self, error: str, begins: str = "", walk: Sequence[int] = ()) -> str: ...
