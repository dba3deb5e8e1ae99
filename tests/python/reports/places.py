"""Where each report is tried."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import training


@dataclass
class Place:
    name: str
    ranks: int
    stage: int = 3
    is_offloaded: bool = False
    zero: dict[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> dict[str, Any]:
        # Small units would be gathered as one group, so that each has memory of its own. Those of a large model share it.
        return training.config(self.stage, zero={"allgather_bucket_size": 0, **self.zero}, **more)

    def with_sgd(self) -> dict[str, Any]:
        """A configuration whose updates show the gradients."""
        return self.config(optimizer={"type": "SGD", "params": {"lr": 0.1}}, gradient_clipping=0)

    def batches(self, steps: int = 3, accumulate: int = 1) -> list[list[Any]]:
        return training.vector_batches(steps, self.ranks * accumulate)


ON_NVME = Place("two ranks on NVMe", 2, is_offloaded=True)
PLACES = [Place("one rank", 1), ON_NVME]
if os.environ.get("EBB_FULL"):
    PLACES += [Place("stage 0", 1, 0), Place("NVMe", 1, is_offloaded=True), Place("two ranks at stage 0", 2, 0), Place("two ranks", 2)]
