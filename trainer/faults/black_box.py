"""Where a rank is, kept where it can still be read when the rank is gone: in memory shared with another process."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path

from trainer.errors import MOST_LISTED
from trainer.faults.place import Place
from trainer.memory.monitor import Monitor

SHARED_MEMORY = Path("/dev/shm")
SAMPLES = MOST_LISTED + 1
LAYOUT = struct.Struct(f"=qq16sq{SAMPLES}q")
"""Steps, moves, activity, and the first samples after how many they are."""

PADDING = (0,) * SAMPLES


class BlackBox:
    """Writes down every move of a rank, for half a microsecond each.

    The file is removed by whoever opens it to read, or by ``close``: a rank that is killed leaves none behind.

    Args:
        monitor: announces the moves.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        descriptor, self.path = tempfile.mkstemp(prefix="trainer-rank-", dir=folder)
        os.ftruncate(descriptor, LAYOUT.size)
        self.memory = mmap.mmap(descriptor, LAYOUT.size)
        os.close(descriptor)
        self.write()
        monitor.on_move = self.write

    def write(self) -> None:
        """Note where the rank is now."""
        monitor = self.monitor
        samples = monitor.samples[:SAMPLES]
        count = len(samples)
        activity = (monitor.activity or "").encode()
        LAYOUT.pack_into(self.memory, 0, monitor.step, monitor.moves, activity, count, *samples, *PADDING[count:])

    def close(self) -> None:
        """Write no more."""
        self.monitor.on_move = None
        Path(self.path).unlink(missing_ok=True)


def open_box(path: str) -> mmap.mmap | None:
    """The memory of another rank's black box; ``None`` when it cannot be reached from here."""
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), LAYOUT.size, access=mmap.ACCESS_READ)
        Path(path).unlink(missing_ok=True)
    except (OSError, ValueError):
        return None
    return memory


def read_box(memory: mmap.mmap, rank: int) -> Place:
    """Where ``rank`` was last."""
    steps, moves, activity, count, *samples = LAYOUT.unpack_from(memory, 0)
    return Place(rank, steps, activity.rstrip(b"\0").decode() or None, tuple(samples[:count]), moves)
