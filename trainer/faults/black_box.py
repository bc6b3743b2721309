"""Where a rank is, kept where it can still be read when the rank is gone: in memory shared with another process."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from trainer.errors import MOST_LISTED
from trainer.faults.place import Place
from trainer.memory.monitor import Monitor
from trainer.system.files import open_regular
from trainer.system.text import escaped

SAMPLES = MOST_LISTED + 1
LAYOUT = struct.Struct(f"=qq16sq{SAMPLES}q")
"""Steps, moves, activity, and the first samples after how many they are."""

PADDING = (0,) * SAMPLES

NAME = "trainer-rank"


class BlackBox:
    """Writes down every move of a rank, for half a microsecond each.

    It is a file without a name, in memory: nothing of it is left when nobody has it open any more.

    Args:
        monitor: announces the moves.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._descriptor: int | None = None
        if hasattr(os, "memfd_create"):  # on Linux, where alone another process is looked at
            self._descriptor = os.memfd_create(NAME)
            os.ftruncate(self._descriptor, LAYOUT.size)
        self.memory = mmap.mmap(-1 if self._descriptor is None else self._descriptor, LAYOUT.size)
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
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def open_box(pid: int) -> mmap.mmap | None:
    """The memory of the black box of the rank that is process ``pid``; ``None`` when it cannot be reached from here."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link) == f"/memfd:{NAME} (deleted)":
                with open_regular(link, LAYOUT.size) as file:
                    return mmap.mmap(file.fileno(), LAYOUT.size, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    return None


def read_box(memory: mmap.mmap, rank: int) -> Place:
    """Where ``rank`` was last."""
    steps, moves, activity, count, *samples = LAYOUT.unpack_from(memory, 0)
    return Place(
        rank, steps, escaped(activity.rstrip(b"\0").decode(errors="replace")) or None, tuple(samples[:count]), moves
    )
