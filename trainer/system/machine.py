"""What this process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_bytes() -> int | None:
    """Host memory that this process and its children may still take, within its control group; ``None``: not known."""
    free = _numbers(MEMINFO).get("MemAvailable:")
    if free is None:
        return None
    free *= 1024
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        # The group is charged for files that were read, which the kernel gives up when memory is asked for.
        files = _numbers(CGROUP / "memory.stat").get("inactive_file", 0)
        free = min(free, int(limit.read_text()) - int(used.read_text()) + files)
    return free


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line, by the word before it; none where there is no such file."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
