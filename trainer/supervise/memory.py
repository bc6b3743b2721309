"""Out of memory, as it looks from outside: the run's own words, or the kernel's count of what it had to kill."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from pathlib import Path

from trainer.checkpoint.folder import CheckpointFolder
from trainer.checkpoint.manifest import MOST_BYTES, CorruptCheckpoint, read_manifest
from trainer.supervise.attempt import Attempt, Ending, Sizes, sizes_in
from trainer.system.files import read_regular

VMSTAT, CGROUPS, CGROUP_ROOT = Path("/proc/vmstat"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NO_SCHEDULE = re.compile(r"^accumulate: (null|\d+)$", re.MULTILINE)
"""How ``recipe.yaml`` says that all epochs have the same batch."""


def kernel_kills() -> int:
    """How many processes the kernel has killed because memory ran out: of this control group, or else of this machine.

    0 where neither is told. Only a difference between two calls means something.
    """
    own = None
    with suppress(OSError, StopIteration):
        line = next(line for line in CGROUPS.read_text().splitlines() if line.startswith("0::"))
        own = _entry(CGROUP_ROOT / line.removeprefix("0::").lstrip("/") / "memory.events")
    return _entry(VMSTAT) or 0 if own is None else own


def _entry(path: Path) -> int | None:
    """The number beside ``oom_kill`` in a file of names and numbers."""
    try:
        entries = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
        return int(entries["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def ran_out_of_memory(ending: Ending, kills: int) -> bool:
    """Whether an attempt ended for want of memory.

    Args:
        ending: of the attempt.
        kills: of the kernel, while the attempt lasted.
    """
    if ending.code == 1 and "out of memory" in ending.cause.lower():
        return True
    return kills > 0 and (ending.code == -signal.SIGKILL or "was killed" in ending.cause)


def known_sizes(run_dir: Path, attempt: Attempt, since: float) -> Sizes | None:
    """How the batches of ``attempt`` were cut in the end, if that is known and micro-batches can be made smaller.

    From its ``summary.json``, if it was written after ``since`` (seconds since the epoch); else from what it said; else
    from the manifest of the newest checkpoint. ``None`` for a schedule of ``accumulate``, which gives each epoch a
    batch of its own.
    """
    if _has_schedule(run_dir):
        return None
    summary = run_dir / "summary.json"
    with suppress(OSError, ValueError, KeyError):
        if summary.stat().st_mtime >= since:
            found = json.loads(read_regular(summary, MOST_BYTES))
            return Sizes(int(found["batch_size"]), int(found["micro_batch_size"]))
    if attempt.sizes is not None:
        return attempt.sizes
    for path in CheckpointFolder(run_dir / "checkpoints").newest_first():
        with suppress(CorruptCheckpoint):
            return sizes_in(read_manifest(path).plan)
    return None


def _has_schedule(run_dir: Path) -> bool:
    with suppress(OSError):
        return NO_SCHEDULE.search(read_regular(run_dir / "recipe.yaml", MOST_BYTES).decode(errors="replace")) is None
    return False
