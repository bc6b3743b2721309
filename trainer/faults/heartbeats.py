"""Heartbeats and failure reports of the ranks, exchanged through the launcher's store when collectives are broken.

The store has no password, so its content is untrusted: it is checked, and ignored if a rank cannot have written it. A
process is killed only by the rank that watched it.
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
from trainer.faults.rank_status import RankStatus, SharedStatus, open_shared_status, read_shared_status
from trainer.memory.monitor import MemoryMonitor
from trainer.system.files import parse_json_object
from trainer.system.processes import ProcessId
from trainer.system.text import escaped

POLL_INTERVAL = 1.0

MAX_MISSED_HEARTBEATS = 10
"""Checks in a row without a new heartbeat after which a rank counts as dead if its process cannot be inspected.

Counted in checks of the watching rank, so that a pause of all processes does not count as silence."""

STORE_TIMEOUT = timedelta(seconds=10)
MAX_MESSAGE_BYTES = 1 << 16  # maximum size of a value in the store
MAX_REASON_CHARS = 2000  # characters of a reported reason


@dataclass(frozen=True)
class EndReason:
    """The reason why the run ends. The first rank that reports one decides for all ranks."""

    text: str
    is_stopped: bool = False  # a rank is suspended; the rank that watched it kills it

    @classmethod
    def parse(cls, content: bytes) -> EndReason:
        """Parse the reason in the store; for content that no rank wrote, return a reason that reports this."""
        found = parse_json_object(content, MAX_MESSAGE_BYTES)
        if found is None or not isinstance(found.get("text"), str):
            return cls("the ranks' store holds content that no rank wrote: check who can reach its port")
        text = escaped(found["text"])
        text = text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]} …"
        return cls(text, found.get("stopped") is True)


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat: the process of the rank, its position in the work, and whether it is exiting normally."""

    process: ProcessId
    place: RankStatus
    leaving: bool

    @classmethod
    def parse(cls, content: bytes, rank: int) -> Heartbeat | None:
        """Parse the heartbeat in the store; ``None`` for content that ``rank`` cannot have written."""
        found = parse_json_object(content, MAX_MESSAGE_BYTES)
        try:
            if found is None or (place := RankStatus.from_dict(found.get("place"))).rank != rank:
                return None
            return cls(ProcessId.from_dict(found.get("process")), place, found.get("leaving") is True)
        except ValueError:
            return None


class Peers:
    """Publishes the heartbeat of this rank, reads what other ranks report, and watches the next rank.

    A ring is enough: of all dead ranks, at least one is watched by a living rank. So each rank sends a few small
    requests per second to the store, for any number of ranks (``size``, at least 2).

    A rank whose process runs is given up only after ``patience`` seconds without a heartbeat, because code that holds
    Python's GIL blocks the heartbeat of a healthy rank.
    """

    def __init__(self, rank: int, size: int, monitor: MemoryMonitor, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self.store = distributed_c10d._get_default_store().clone()  # a separate connection
        self.store.set_timeout(STORE_TIMEOUT)
        # A script may train several times with one launcher store. A run must not read an earlier run's reports.
        self.run = self.store.add(f"watchdogs/{rank}", 1)
        self.next = (rank + 1) % size
        self.own, self.box = ProcessId.current().to_dict(), SharedStatus(monitor)
        self.answers = 0  # number of answers from the store
        self._beats = self._silent = 0
        self._last = b""
        self._last_beat: Heartbeat | None = None
        self._next_process: ProcessId | None = None
        self._next_box: mmap.mmap | None = None
        self._stopped: ProcessId | None = None
        self._acknowledged = False

    def send_heartbeat(self, place: RankStatus, leaving: bool = False) -> None:
        """Publish a heartbeat with the place of this rank, or, if ``leaving``, that it need not be watched any more."""
        self._beats += 1
        beat = {"place": place.to_dict(), "process": self.own, "beat": self._beats, "leaving": leaving}
        if leaving:
            self.box.close()
        self.store.set(self._key("beat", self.rank), json.dumps(beat))
        self.answers += 1

    def announce_end(self, told: EndReason) -> None:
        """Publish why the run ends, unless another rank has already done so."""
        self.store.compare_set(self._key("ended"), "", json.dumps({"text": told.text, "stopped": told.is_stopped}))

    def end_reason(self) -> EndReason | None:
        """Return the reason that a rank, perhaps this one, published; acknowledge it once."""
        if not self.store.check([self._key("ended")]):
            return None
        found = self.store.get(self._key("ended"))
        if not self._acknowledged:
            self._acknowledged = True
            self.store.add(self._key("heard"), 1)
        return EndReason.parse(found)

    def wait_for_end_reason(self, seconds: float) -> EndReason | None:
        until = time.monotonic() + seconds
        while (told := self.end_reason()) is None and time.monotonic() < until:
            time.sleep(POLL_INTERVAL / 10)
        return told

    def wait_for_acknowledgements(self, seconds: float) -> None:
        """Wait up to ``seconds`` until all other ranks have read the reason; then the launcher may end them."""
        until = time.monotonic() + seconds
        while self.store.add(self._key("heard"), 0) < self.size - 1 and time.monotonic() < until:
            time.sleep(POLL_INTERVAL / 10)

    def check_next_rank(self) -> EndReason | None:
        """Check the next rank and return what is wrong with it, if anything."""
        content = self._written(self.next)
        beat = Heartbeat.parse(content, self.next)
        if self._next_process is None:
            if beat is None:  # it has not started yet
                return None
            self._next_process = beat.process
            self._next_box = open_shared_status(beat.process.pid) if beat.process.is_visible() else None
        if beat is not None and beat.process == self._next_process and content != self._last:
            self._silent, self._last, self._last_beat = 0, content, beat
        else:
            self._silent += 1
        if (last := self._last_beat) is None or last.leaving:
            return None
        # The box is exact; a heartbeat may be 1 s old.
        place = last.place if self._next_box is None else read_shared_status(self._next_box, self.next)
        return self._judge(last.process, f"it was last {place.without_rank()}")

    @property
    def knows_next(self) -> bool:
        return bool(self._last)

    def diagnose_store(self) -> EndReason:
        """Return why the store does not answer, as far as this rank can tell without it."""
        process = self._next_process
        if process is not None and process.is_visible() and process.state() == "stopped":
            self._stopped = process
            return EndReason(f"{self._name(process)} is stopped by a signal, and with it the store of all ranks", True)
        address, seconds = os.environ.get("MASTER_ADDR", "the first rank"), MAX_MISSED_HEARTBEATS * POLL_INTERVAL
        why = "the launcher or the first rank is stopped, or its machine is gone or unreachable"
        return EndReason(f"the store of the ranks, at {address}, has not answered for {seconds:g} s: {why}")

    def kill_stopped(self) -> None:
        """Kill the suspended rank that this one found: a launcher's SIGTERM does not end it."""
        if self._stopped is not None:
            self._stopped.kill()

    def slowest_place(self) -> RankStatus | None:
        """Return the place of the rank that has made the least progress."""
        beats = [Heartbeat.parse(self._written(rank), rank) for rank in range(self.size)]
        return min((beat.place for beat in beats if beat), key=lambda place: place.progress_key, default=None)

    def _judge(self, process: ProcessId, position: str) -> EndReason | None:
        name = self._name(process)
        silent = self._silent * POLL_INTERVAL
        state = process.state() if process.is_visible() else "unknown"
        if state == "gone":
            return EndReason(f"{name} was killed or crashed: {position}")
        if self._silent < MAX_MISSED_HEARTBEATS or (state == "running" and silent < self.patience):
            return None
        if state != "unknown":
            self._stopped = process
        if state == "stopped":
            return EndReason(f"{name} is stopped by a signal, for {silent:g} s now: {position}", True)
        if state == "running":
            return EndReason(f"{name} gave no sign for {silent:g} s, but its process runs: {position}", True)
        gone = "it or its machine is gone, or cannot be reached"
        return EndReason(f"{name} gave no sign for {silent:g} s: {gone}; {position}")

    def _name(self, process: ProcessId) -> str:
        return f"rank {self.next} (pid {process.pid} on {process.host})"

    def _written(self, rank: int) -> bytes:
        key = self._key("beat", rank)
        return self.store.get(key) if self.store.check([key]) else b""

    def _key(self, *names: object) -> str:
        return "/".join(map(str, ("watchdog", self.run, *names)))


def is_peer_loss(error: BaseException) -> bool:
    """Return whether ``error`` may be the reaction of a collective to the end of another rank."""
    if isinstance(error, RecipeError | RunError):
        return False
    if not dist.is_initialized():  # the group was aborted
        return True
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "collectives were aborted")
    is_known = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return is_known or isinstance(error, dist.DistError)
