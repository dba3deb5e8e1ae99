"""Values between steps of the parameters that are whole on every rank. Each rank shows them alone, because nothing is exchanged for that: what
updates and gathers have enqueued is waited for."""

from __future__ import annotations

from ctypes import byref, c_int32

from ._library import check, library
from ._tensors import Memory, Slots
from ._units import Unit


class WholeValues:
    """Residents always show a value. The other parameters do so from the first read after a step on, and only if `enabled`."""

    def __init__(self, memory: Memory, units: list[Unit], slots: list[Slots]):
        self.memory = memory
        self.units = units
        self.slots = slots
        self.residents = [unit for unit in units if unit.keep_whole]
        self.enabled = False
        self.is_stale = False  # residents show the values before the last update
        self._is_whole = c_int32()

    def age(self) -> None:
        """Before the updates of a step are enqueued."""
        self.is_stale = True
        for unit in self.residents:
            self.slots[unit.index].age()

    def show_residents(self) -> None:
        """Between steps: those after the last update."""
        if self.is_stale:
            for unit in self.residents:
                self.slots[unit.index].check()
                self._await(unit)
                self.slots[unit.index].show()
            self.is_stale = False

    def show(self) -> None:
        """Between steps: those of the other parameters, until hide()."""
        for unit in self.units if self.enabled else ():
            slots = self.slots[unit.index]
            if not unit.keep_whole and not slots.stays and self._await(unit):
                slots.check()
                slots.show()
                slots.stays = True

    def hide(self) -> None:
        """Before values change."""
        for slots in self.slots:
            slots.end_stay()

    def _await(self, unit: Unit) -> bool:
        """Whether the unit is whole on every rank. If it is, its updates have ended."""
        check(library.ebb_engine_await_whole(self.memory.handle, unit.index, byref(self._is_whole)))
        return bool(self._is_whole.value)
