"""What the ranks of a run know of each other when collectives no longer tell: through the launcher's store."""

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
from trainer.faults.black_box import BlackBox, open_box, read_box
from trainer.faults.place import Place
from trainer.memory.monitor import Monitor
from trainer.processes import ProcessId

SECONDS_BETWEEN_LOOKS = 1.0

LOOKS_OF_SILENCE = 10
"""Looks in a row without a new beat after which a rank that cannot be looked at is given up. Counted in looks of the
watching rank: when all processes were stopped for a while, none of them has been silent."""

STORE_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Told:
    """Why the run ends: the first rank to say so is believed by all."""

    text: str
    process: ProcessId | None = None
    """Of a rank that must be killed, for it is stopped."""


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
        self._acknowledged = False

    def beat(self, place: Place, leaving: bool = False) -> None:
        """Show that this rank lives, and where it is; or that it leaves, and need not be watched any more."""
        self._beats += 1
        beat = {"place": place.to_dict(), "process": self.own, "beat": self._beats, "box": self.box.path}
        if leaving:
            self.box.close()
            beat["leaving"] = True
        self.store.set(self._key("beat", self.rank), json.dumps(beat))
        self.answers += 1

    def tell(self, told: Told) -> None:
        """Say why the run ends, unless another rank has said so before."""
        process = told.process and told.process.to_dict()
        self.store.compare_set(self._key("ended"), "", json.dumps({"text": told.text, "process": process}))

    def told(self) -> Told | None:
        """What a rank has told, this one or another; hearing it is acknowledged, once."""
        if not self.store.check([self._key("ended")]):
            return None
        found = json.loads(self.store.get(self._key("ended")))
        if not self._acknowledged:
            self._acknowledged = True
            self.store.add(self._key("heard"), 1)
        return Told(found["text"], ProcessId(**found["process"]) if found["process"] else None)

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
        if found is None:  # it has not begun yet
            return None
        beat = json.loads(found)
        process, place = ProcessId(**beat["process"]), Place.from_dict(beat["place"])
        if not self._last and process.is_here():
            self._others_box = open_box(beat["box"])
        self._silent = self._silent + 1 if found == self._last else 0
        self._last = found
        if self._others_box is not None:  # a beat is as old as a second
            place = read_box(self._others_box, self.next)
        return None if "leaving" in beat else self._judge(process, place)

    @property
    def knows_next(self) -> bool:
        """Whether the next rank was seen."""
        return bool(self._last)

    def why_silent(self) -> Told:
        """Why the store does not answer, as far as this rank sees without it."""
        beat = json.loads(self._last) if self._last else {}
        process = ProcessId(**beat["process"]) if beat else None
        if process is not None and process.is_here() and process.state() == "stopped":
            name = f"rank {self.next} (pid {process.pid} on {process.host})"
            return Told(f"{name} is stopped by a signal, and with it the store of all ranks", process)
        seconds = LOOKS_OF_SILENCE * SECONDS_BETWEEN_LOOKS
        return Told(
            f"the store of the ranks, at {os.environ.get('MASTER_ADDR', 'the first rank')}, has not answered for "
            f"{seconds:g} s: the launcher, or the rank that it began with, is stopped, or its machine is gone or "
            "cannot be reached"
        )

    def furthest_behind(self) -> Place | None:
        """Where the rank is that has moved on the least."""
        beats = [found for rank in range(self.size) if (found := self._beat_of(rank)) is not None]
        places = [Place.from_dict(json.loads(beat)["place"]) for beat in beats]
        return min(places, key=lambda place: place.position) if places else None

    def _judge(self, process: ProcessId, place: Place) -> Told | None:
        name = f"rank {self.next} (pid {process.pid} on {process.host})"
        silent = self._silent * SECONDS_BETWEEN_LOOKS
        state = process.state() if process.is_here() else "unknown"
        if state == "gone":
            return Told(f"{name} was killed or crashed: it was last {place.at()}")
        if self._silent < LOOKS_OF_SILENCE or (state == "running" and silent < self.patience):
            return None
        if state == "stopped":
            return Told(f"{name} is stopped by a signal, for {silent:g} s now: it was last {place.at()}", process)
        if state == "running":
            return Told(f"{name} gave no sign for {silent:g} s, last {place.at()}, though its process runs", process)
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
