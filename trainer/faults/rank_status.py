"""The position of a rank in its work: described in messages, and kept in memory that outlives the rank."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.errors import MAX_LISTED_ITEMS, format_list
from trainer.memory.monitor import MemoryMonitor
from trainer.system.files import open_regular
from trainer.system.text import escaped

AFTER_A_STEP = (None, "evaluation", "checkpoint", "init")  # activities between steps; init in a resumed run
SAMPLES = MAX_LISTED_ITEMS + 1  # samples that are kept: one more than a message lists
MAX_ACTIVITY_BYTES = 64


@dataclass(frozen=True)
class RankStatus:
    """The position of a rank in its work at one moment."""

    rank: int  # global rank
    steps: int  # completed steps
    activity: str | None  # a phase, loading or another activity of the monitor; None between activities
    samples: tuple[int, ...] = ()  # dataset indices of the first samples in the current micro-batch
    moves: int = 0  # how often the activity changed since the last step ended

    @classmethod
    def from_monitor(cls, rank: int, monitor: MemoryMonitor) -> RankStatus:
        return cls(rank, monitor.step, monitor.activity, tuple(map(int, monitor.samples[:SAMPLES])), monitor.moves)

    @classmethod
    def from_dict(cls, values: Any) -> RankStatus:
        """Return the place that :meth:`to_dict` wrote; raise a ValueError for anything else."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("not a place")
        activity, samples = values["activity"], values["samples"]
        if not isinstance(samples, list | tuple) or len(samples) > SAMPLES:
            raise ValueError("samples must be a short list")
        numbers = [values["rank"], values["steps"], values["moves"], *samples]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("rank, steps, moves and samples must be integers from 0")
        if activity is not None and not (isinstance(activity, str) and len(activity) <= MAX_ACTIVITY_BYTES):
            raise ValueError("activity must be a short string")
        return cls(**values | {"samples": tuple(samples), "activity": activity and escaped(activity)})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def progress_key(self) -> tuple[int, int]:
        """Two counters that grow as the rank makes progress, comparable between ranks."""
        return self.steps, self.moves

    def step_number(self) -> str:
        """Describe the current step, counted from 1, or the last completed one."""
        if self.activity == "init" and not self.steps:
            return "before step 1"
        return f"after step {self.steps}" if self.activity in AFTER_A_STEP else f"step {self.steps + 1}"

    def activity_text(self) -> str:
        return {"init": "building the model", None: "between steps"}.get(self.activity, self.activity or "")

    def __str__(self) -> str:
        samples = [f"samples {format_list(self.samples)}"] if self.samples else []
        return ", ".join([f"rank {self.rank}", self.step_number(), self.activity_text(), *samples])

    def without_rank(self) -> str:
        """Describe the place without the rank, as the end of a sentence."""
        when = self.step_number() if self.step_number()[0] != "s" else f"at {self.step_number()}"
        samples = f" (samples {format_list(self.samples)})" if self.samples else ""
        return f"{when} in {self.activity_text()}{samples}" if self.activity else f"{when}, between steps"


NAME = "trainer-rank"
LAYOUT = struct.Struct(f"=qq16sq{SAMPLES}q")  # steps, moves, activity, number of samples, samples
PADDING = (0,) * SAMPLES


class SharedStatus:
    """Writes every place of this rank to shared memory; 0.5 µs each. A heartbeat, up to 1 s old, cannot name the step
    of a crash. The memory is an anonymous file, which disappears when no process has it open."""

    def __init__(self, monitor: MemoryMonitor) -> None:
        self.monitor = monitor
        descriptor = -1
        if hasattr(os, "memfd_create"):  # only on Linux can another process open it
            descriptor = os.memfd_create(f"{NAME}-{os.getpid()}")
            os.ftruncate(descriptor, LAYOUT.size)
        self.memory = mmap.mmap(descriptor, LAYOUT.size)
        if descriptor >= 0:
            os.close(descriptor)  # the mapping keeps a duplicate, by which another process finds it
        self.write()
        monitor.on_move = self.write

    def write(self) -> None:
        monitor, samples = self.monitor, self.monitor.samples[:SAMPLES]
        activity, count = (monitor.activity or "").encode(), len(samples)
        LAYOUT.pack_into(self.memory, 0, monitor.step, monitor.moves, activity, count, *samples, *PADDING[count:])

    def close(self) -> None:
        self.monitor.on_move = None
        self.memory.close()


def open_shared_status(pid: int) -> mmap.mmap | None:
    """Open the shared memory of the rank with process id ``pid``; ``None`` if it is not accessible."""
    with suppress(OSError, ValueError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.path.realpath(link) == f"/memfd:{NAME}-{pid} (deleted)":  # realpath never raises
                with open_regular(link, LAYOUT.size) as file:
                    return mmap.mmap(file.fileno(), LAYOUT.size, access=mmap.ACCESS_READ)
    return None


def read_shared_status(memory: mmap.mmap, rank: int) -> RankStatus:
    """Return the last place that ``rank`` wrote."""
    steps, moves, words, count, *samples = LAYOUT.unpack_from(memory, 0)
    activity = escaped(words.rstrip(b"\0").decode(errors="replace")) or None
    return RankStatus(rank, steps, activity, tuple(samples[:count]), moves)
