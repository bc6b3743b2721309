"""Where a rank is in its work: in words, and kept where it can still be read when the rank is gone."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.errors import MOST_LISTED, listed
from trainer.memory.monitor import Monitor
from trainer.system.files import open_regular
from trainer.system.text import escaped

AFTER_A_STEP = (None, "evaluation", "checkpoint", "init")  # init: of a run that is resumed
SAMPLES = MOST_LISTED + 1  # of them, as many are kept as are shown, and one
LONGEST_ACTIVITY = 64


@dataclass(frozen=True)
class Place:
    """Of a rank, at one moment."""

    rank: int  # over all machines
    steps: int  # taken so far
    activity: str | None  # a phase, loading or anything that was announced to the monitor; None between them
    samples: tuple[int, ...] = ()  # the first of those that it works on, by their place in the dataset
    moves: int = 0  # how often the activity changed since the last step ended

    @classmethod
    def of(cls, rank: int, monitor: Monitor) -> Place:
        """Where ``rank`` is by its monitor."""
        return cls(rank, monitor.step, monitor.activity, tuple(map(int, monitor.samples[:SAMPLES])), monitor.moves)

    @classmethod
    def from_dict(cls, values: Any) -> Place:
        """What :meth:`to_dict` gave; a ValueError for what came from elsewhere and cannot be that."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("no place")
        activity, samples = values["activity"], values["samples"]
        if not isinstance(samples, list | tuple) or len(samples) > SAMPLES:
            raise ValueError("no list of samples")
        numbers = [values["rank"], values["steps"], values["moves"], *samples]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("no number of a step or a sample")
        if activity is not None and not (isinstance(activity, str) and len(activity) <= LONGEST_ACTIVITY):
            raise ValueError("no activity")
        known = None if activity is None else escaped(activity)
        return cls(**values | {"samples": tuple(samples), "activity": known})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def position(self) -> tuple[int, int]:
        """Rises as a rank moves on, alike on all ranks."""
        return self.steps, self.moves

    def when(self) -> str:
        """The step: that which is being taken, from 1, or the one taken last."""
        if self.activity == "init" and not self.steps:
            return "before step 1"
        return f"after step {self.steps}" if self.activity in AFTER_A_STEP else f"step {self.steps + 1}"

    def what(self) -> str:
        """The activity."""
        return {"init": "building the model", None: "between steps"}.get(self.activity, self.activity or "")

    def __str__(self) -> str:
        samples = [f"samples {listed(self.samples)}"] if self.samples else []
        return ", ".join([f"rank {self.rank}", self.when(), self.what(), *samples])

    def at(self) -> str:
        """The same without the rank, as the end of a sentence."""
        when = self.when() if self.when()[0] != "s" else f"at {self.when()}"
        samples = f" (samples {listed(self.samples)})" if self.samples else ""
        return f"{when} in {self.what()}{samples}" if self.activity else f"{when}, between steps"


NAME = "trainer-rank"
LAYOUT = struct.Struct(f"=qq16sq{SAMPLES}q")  # steps, moves, activity, and the first samples after how many they are
PADDING = (0,) * SAMPLES


class BlackBox:
    """Writes down every move of a rank, as the ``monitor`` announces it, for half a microsecond each.

    It is a file without a name, in memory shared with other processes: nothing of it is left when nobody has it open.
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
    steps, moves, words, count, *samples = LAYOUT.unpack_from(memory, 0)
    activity = escaped(words.rstrip(b"\0").decode(errors="replace")) or None
    return Place(rank, steps, activity, tuple(samples[:count]), moves)
