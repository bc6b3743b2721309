"""What the ranks of a run know of each other when collectives no longer tell: through the launcher's store.

The store has no password. What is read from it is data, which may be anybody's: it is checked, and what cannot be of a
rank is as if it were not there. A process is killed only by the rank that has watched it.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.errors import RecipeError, RunError
from trainer.faults.place import BlackBox, Place, open_box, read_box
from trainer.memory.monitor import Monitor
from trainer.system.files import parsed_object
from trainer.system.processes import ProcessId
from trainer.system.text import escaped

SECONDS_BETWEEN_LOOKS = 1.0

LOOKS_OF_SILENCE = 10
"""Looks in a row without a new beat after which a rank that cannot be looked at is given up. Counted in looks of the
watching rank: when all processes were stopped for a while, none of them has been silent."""

STORE_TIMEOUT = timedelta(seconds=10)
MOST_BYTES = 1 << 16  # of what a rank writes there at once
LONGEST_TOLD = 2000  # characters of a line that a rank ends with


@dataclass(frozen=True)
class Told:
    """Why the run ends: the first rank to say so is believed by all."""

    text: str
    is_stopped: bool = False  # that is a rank which does not run, and which the one that has watched it kills

    @classmethod
    def read(cls, content: bytes) -> Told:
        """What the store holds of it, or a line for what no rank has written."""
        found = parsed_object(content, MOST_BYTES)
        if found is None or not isinstance(found.get("text"), str):
            return cls("the ranks' store holds what no rank writes there: can others reach its port?")
        text = escaped(found["text"])
        text = text if len(text) <= LONGEST_TOLD else f"{text[:LONGEST_TOLD]} …"
        return cls(text, found.get("stopped") is True)


@dataclass(frozen=True)
class Beat:
    """A sign of life: which process the rank is, where it is in its work, and whether it leaves in peace."""

    process: ProcessId
    place: Place
    leaving: bool

    @classmethod
    def read(cls, content: bytes, rank: int) -> Beat | None:
        """What the store holds of it; ``None`` for what ``rank`` cannot have written."""
        found = parsed_object(content, MOST_BYTES)
        try:
            if found is None or (place := Place.from_dict(found.get("place"))).rank != rank:
                return None
            return cls(ProcessId.from_dict(found.get("process")), place, found.get("leaving") is True)
        except ValueError:
            return None


class Peers:
    """Tells the others where this rank is, hears what they tell, and watches one of them: the next.

    A ring suffices: of any ranks that are gone, at least one is watched by a rank that is not. So the store has a few
    small requests a second from each rank, however many there are (``size``, two or more).

    A rank whose process is there, and runs, is given up after ``patience`` seconds of silence: one that computes
    without letting Python's other threads run is silent, and well.
    """

    def __init__(self, rank: int, size: int, monitor: Monitor, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self.store = distributed_c10d._get_default_store().clone()  # a connection of its own
        self.store.set_timeout(STORE_TIMEOUT)
        # A script may train several times over one launcher's store: what one run tells, no later one shall hear.
        self.run = self.store.add(f"watchdogs/{rank}", 1)
        self.next = (rank + 1) % size
        self.own = ProcessId.own().to_dict()
        self.box = BlackBox(monitor)
        self.answers = 0  # of the store
        self._beats = self._silent = 0
        self._last = b""
        self._last_beat: Beat | None = None
        self._next_process: ProcessId | None = None
        self._next_box: mmap.mmap | None = None
        self._stopped: ProcessId | None = None
        self._acknowledged = False

    def beat(self, place: Place, leaving: bool = False) -> None:
        """Show that this rank lives, and where it is; or that it leaves, and need not be watched any more."""
        self._beats += 1
        beat = {"place": place.to_dict(), "process": self.own, "beat": self._beats, "leaving": leaving}
        if leaving:
            self.box.close()
        self.store.set(self._key("beat", self.rank), json.dumps(beat))
        self.answers += 1

    def tell(self, told: Told) -> None:
        """Say why the run ends, unless another rank has said so before."""
        self.store.compare_set(self._key("ended"), "", json.dumps({"text": told.text, "stopped": told.is_stopped}))

    def told(self) -> Told | None:
        """What a rank has told, this one or another; hearing it is acknowledged, once."""
        if not self.store.check([self._key("ended")]):
            return None
        found = self.store.get(self._key("ended"))
        if not self._acknowledged:
            self._acknowledged = True
            self.store.add(self._key("heard"), 1)
        return Told.read(found)

    def wait_told(self, seconds: float) -> Told | None:
        """What a rank tells within ``seconds``."""
        until = time.monotonic() + seconds
        while (told := self.told()) is None and time.monotonic() < until:
            time.sleep(SECONDS_BETWEEN_LOOKS / 10)
        return told

    def wait_heard(self, seconds: float) -> None:
        """Wait until all other ranks have heard, or ``seconds``: then the launcher may end them."""
        until = time.monotonic() + seconds
        while self.store.add(self._key("heard"), 0) < self.size - 1 and time.monotonic() < until:
            time.sleep(SECONDS_BETWEEN_LOOKS / 10)

    def look(self) -> Told | None:
        """What is wrong with the next rank, if anything is."""
        content = self._written(self.next)
        beat = Beat.read(content, self.next)
        if self._next_process is None:
            if beat is None:  # it has not begun yet
                return None
            self._next_process = beat.process
            self._next_box = open_box(beat.process.pid) if beat.process.is_here() else None
        if beat is not None and beat.process == self._next_process and content != self._last:
            self._silent, self._last, self._last_beat = 0, content, beat
        else:
            self._silent += 1
        if (last := self._last_beat) is None or last.leaving:
            return None
        # A beat is as old as a second.
        return self._judge(last.process, last.place if self._next_box is None else read_box(self._next_box, self.next))

    @property
    def knows_next(self) -> bool:
        """Whether the next rank was seen."""
        return bool(self._last)

    def why_silent(self) -> Told:
        """Why the store does not answer, as far as this rank sees without it."""
        process = self._next_process
        if process is not None and process.is_here() and process.state() == "stopped":
            self._stopped = process
            return Told(f"{self._name(process)} is stopped by a signal, and with it the store of all ranks", True)
        address, seconds = os.environ.get("MASTER_ADDR", "the first rank"), LOOKS_OF_SILENCE * SECONDS_BETWEEN_LOOKS
        why = "the launcher, or the rank that it began with, is stopped, or its machine is gone or cannot be reached"
        return Told(f"the store of the ranks, at {address}, has not answered for {seconds:g} s: {why}")

    def kill_stopped(self) -> None:
        """End the rank that this one has found stopped: the signals of a launcher would not."""
        if self._stopped is not None:
            self._stopped.kill()

    def furthest_behind(self) -> Place | None:
        """Where the rank is that has moved on the least."""
        beats = [Beat.read(self._written(rank), rank) for rank in range(self.size)]
        places = [beat.place for beat in beats if beat is not None]
        return min(places, key=lambda place: place.position) if places else None

    def _judge(self, process: ProcessId, place: Place) -> Told | None:
        name = self._name(process)
        silent = self._silent * SECONDS_BETWEEN_LOOKS
        state = process.state() if process.is_here() else "unknown"
        if state == "gone":
            return Told(f"{name} was killed or crashed: it was last {place.at()}")
        if self._silent < LOOKS_OF_SILENCE or (state == "running" and silent < self.patience):
            return None
        if state != "unknown":
            self._stopped = process
        if state == "stopped":
            return Told(f"{name} is stopped by a signal, for {silent:g} s now: it was last {place.at()}", True)
        if state == "running":
            return Told(f"{name} gave no sign for {silent:g} s, last {place.at()}, though its process runs", True)
        gone = "it or its machine is gone, or cannot be reached"
        return Told(f"{name} gave no sign for {silent:g} s: {gone}; it was last {place.at()}")

    def _name(self, process: ProcessId) -> str:
        return f"rank {self.next} (pid {process.pid} on {process.host})"

    def _written(self, rank: int) -> bytes:
        key = self._key("beat", rank)
        return self.store.get(key) if self.store.check([key]) else b""

    def _key(self, *names: object) -> str:
        return "/".join(map(str, ("watchdog", self.run, *names)))


def is_echo(error: BaseException) -> bool:
    """Whether ``error`` may be what a collective says when another rank has gone."""
    if isinstance(error, RecipeError | RunError):
        return False
    if not dist.is_initialized():  # the group was aborted
        return True
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "collectives were aborted")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )
