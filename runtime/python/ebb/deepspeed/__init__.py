"""Programs that import deepspeed run on Ebb:

    python -m ebb.deepspeed train.py --deepspeed ds_config.json
    python -m ebb.deepspeed accelerate launch --config_file zero3.yaml train.py

`path/` has a package `deepspeed`, which these commands put in front of the path. docs/deepspeed.md has the names, and what differs."""

from __future__ import annotations

import os
import sys

VERSION = "0.19.8"  # of DeepSpeed, whose names these are
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")


def install() -> None:
    """Makes `import deepspeed` Ebb's, in this process and in those that it starts. Raises if DeepSpeed or accelerate is imported already."""
    # accelerate looks for deepspeed when it is imported.
    loaded = sys.modules.get("deepspeed") or (PATH not in sys.path and sys.modules.get("accelerate.utils"))
    if loaded and not hasattr(loaded, "__ebb__"):
        raise ImportError(f"{loaded.__name__} is imported already, from {loaded.__file__}: call ebb.deepspeed.install() before")
    if PATH not in sys.path:
        sys.path.insert(0, PATH)
    os.environ.update(environment())


def environment() -> dict[str, str]:
    """The variables of a process that finds Ebb's `deepspeed`: the module and the command."""
    above = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # of the package ebb, which -m may have found by itself
    return {
        "PYTHONPATH": _first((PATH, above), os.environ.get("PYTHONPATH")),
        "PATH": _first((os.path.join(PATH, "bin"),), os.environ.get("PATH")),
    }


def _first(folders: tuple[str, ...], others: str | None) -> str:
    return os.pathsep.join([*folders, *(one for one in (others or "").split(os.pathsep) if one and one not in folders)])
