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
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer.errors import RecipeError, RunError
from trainer.faults.black_box import BlackBox, open_box, read_box
from trainer.faults.place import Place
from trainer.memory.monitor import Monitor
from trainer.system.processes import ProcessId
from trainer.system.text import escaped

SECONDS_BETWEEN_LOOKS = 1.0

LOOKS_OF_SILENCE = 10
"""Looks in a row without a new beat after which a rank that cannot be looked at is given up. Counted in looks of the
watching rank: when all processes were stopped for a while, none of them has been silent."""

STORE_TIMEOUT = timedelta(seconds=10)

MOST_BYTES = 1 << 16
"""Of what a rank writes there at once."""

LONGEST_TOLD = 2000
"""Characters of a line that a rank ends with."""


@dataclass(frozen=True)
class Told:
    """Why the run ends: the first rank to say so is believed by all."""

    text: str
    is_stopped: bool = False
    """Whether that is a rank which does not run, and which the one that has watched it kills."""

    @classmethod
    def read(cls, content: bytes) -> Told:
        """What the store holds of it; a line of its own kind for what no rank has written."""
        found = _parsed(content)
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
        found = _parsed(content)
        try:
            if found is None or (place := Place.from_dict(found.get("place"))).rank != rank:
                return None
            return cls(ProcessId.from_dict(found.get("process")), place, found.get("leaving") is True)
        except ValueError:
            return None


def _parsed(content: bytes) -> dict[str, Any] | None:
    if len(content) > MOST_BYTES:
        return None
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Peers:
    """Tells the others where this rank is, hears what they tell, and watches one of them: the next.

    A ring suffices: of any ranks that are gone, at least one is watched by a rank that is not. So the store has a few
    small requests a second from each rank, however many there are.

    Args:
        rank: this one.
        size: ranks, two or more.
        monitor: of this rank.
        patience: seconds of silence after which a rank is given up whose process is there, and runs: one that computes
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
        self._others_box: mmap.mmap | None = None
        self.answers = 0
        """How often the store has answered."""
        self._beats = self._silent = 0
        self._last = b""
        self._next_process: ProcessId | None = None
        self._stopped: ProcessId | None = None
        self._acknowledged = False

    def beat(self, place: Place, leaving: bool = False) -> None:
        """Show that this rank lives, and where it is; or that it leaves, and need not be watched any more."""
        self._beats += 1
        beat = {"place": place.to_dict(), "process": self.own, "beat": self._beats}
        if leaving:
            self.box.close()
            beat["leaving"] = True
        self.store.set(self._key("beat", self.rank), json.dumps(beat))
        self.answers += 1

    def tell(self, told: Told) -> None:
        """Say why the run ends, unless another rank has said so before."""
        found = {"text": told.text, "stopped": told.is_stopped}
        self.store.compare_set(self._key("ended"), "", json.dumps(found))

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
        found = self._beat_of(self.next)
        beat = None if found is None else Beat.read(found, self.next)
        if self._next_process is None:
            if beat is None:  # it has not begun yet
                return None
            self._next_process = beat.process
            if beat.process.is_here():
                self._others_box = open_box(beat.process.pid)
        is_its = beat is not None and beat.process == self._next_process
        if found is not None and is_its and found != self._last:
            self._silent, self._last = 0, found
        else:
            self._silent += 1
        beat = Beat.read(self._last, self.next)
        if beat is None:
            return None
        # A beat is as old as a second.
        place = beat.place if self._others_box is None else read_box(self._others_box, self.next)
        return None if beat.leaving else self._judge(beat.process, place)

    @property
    def knows_next(self) -> bool:
        """Whether the next rank was seen."""
        return bool(self._last)

    def why_silent(self) -> Told:
        """Why the store does not answer, as far as this rank sees without it."""
        process = self._next_process
        if process is not None and process.is_here() and process.state() == "stopped":
            self._stopped = process
            name = f"rank {self.next} (pid {process.pid} on {process.host})"
            return Told(f"{name} is stopped by a signal, and with it the store of all ranks", is_stopped=True)
        seconds = LOOKS_OF_SILENCE * SECONDS_BETWEEN_LOOKS
        return Told(
            f"the store of the ranks, at {os.environ.get('MASTER_ADDR', 'the first rank')}, has not answered for "
            f"{seconds:g} s: the launcher, or the rank that it began with, is stopped, or its machine is gone or "
            "cannot be reached"
        )

    def kill_stopped(self) -> None:
        """End the rank that this one has found stopped: the signals of a launcher would not."""
        if self._stopped is not None:
            self._stopped.kill()

    def furthest_behind(self) -> Place | None:
        """Where the rank is that has moved on the least."""
        found = [(rank, self._beat_of(rank)) for rank in range(self.size)]
        beats = [Beat.read(content, rank) for rank, content in found if content is not None]
        places = [beat.place for beat in beats if beat is not None]
        return min(places, key=lambda place: place.position) if places else None

    def _judge(self, process: ProcessId, place: Place) -> Told | None:
        name = f"rank {self.next} (pid {process.pid} on {process.host})"
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

    def _beat_of(self, rank: int) -> bytes | None:
        key = self._key("beat", rank)
        return self.store.get(key) if self.store.check([key]) else None

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
