"""Kill a rank at one place of a save: ``TRAINER_FAILPOINT="before name@3@1"`` kills rank 1 in its third save.

:func:`install` patches the functions that write a checkpoint. As a script, this file is the ``trainer`` command with
the failpoints installed: ``python benchmarks/chaos/failpoints.py fit ...``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from trainer.checkpoint import writer
from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MANIFEST
from trainer.system.files import write_atomic

VARIABLE = "TRAINER_FAILPOINT"
"""The place, which time the rank comes to it (from 1), and the rank, joined by ``@``."""

OF_EVERY_RANK = ("before tensors", "after tensors", "after sign")
"""Places that every rank comes to in a save."""

NAMES = (*OF_EVERY_RANK, "before manifest", "before name", "after name", "after rotation")
"""All places; only rank 0 comes to the last four."""


def install() -> None:
    """Patch the places of a save, if the environment asks for a kill."""
    if VARIABLE not in os.environ:
        return
    name, count, rank = os.environ[VARIABLE].split("@")
    if name not in NAMES:
        raise ValueError(f"{VARIABLE}: {name!r} is not one of {', '.join(NAMES)}")
    if rank != (os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"):
        return
    owner, function = {  # called once a save; of write_atomic, the calls for the manifest count
        "tensors": (writer, "write_parts"),
        "sign": (writer.CheckpointWriter, "_write_own"),
        "manifest": (writer, "write_atomic"),
        "name": (CheckpointFolder, "commit"),
        "rotation": (CheckpointFolder, "rotate"),
    }[name.partition(" ")[2]]
    setattr(owner, function, _killing(getattr(owner, function), int(count), name.startswith("before")))


def _killing(function: Callable[..., Any], count: int, before: bool) -> Callable[..., Any]:
    """``function``, whose call number ``count`` ends in SIGKILL, before or after the work is done."""
    calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if function is write_atomic and args[0].name != MANIFEST:
            return function(*args, **kwargs)
        calls += 1
        if before and calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return patched


if __name__ == "__main__":
    from trainer.cli import entry

    install()
    entry()
