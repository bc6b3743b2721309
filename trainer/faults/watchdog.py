"""A thread of each rank that detects when this or another rank hangs or died, and ends the process."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress

from trainer.errors import RecipeError, RunError, RunStoppedError
from trainer.faults.heartbeats import MAX_MISSED_HEARTBEATS, POLL_INTERVAL, EndReason, Peers, is_peer_loss
from trainer.faults.rank_status import RankStatus
from trainer.memory.monitor import MemoryMonitor
from trainer.system.error_reports import describe_error, print_error, report, set_location
from trainer.system.redact import redact_value

HANG_CHECKED_PHASES = ("loading", "forward", "backward", "step", "evaluation", "checkpoint")
"""Activities that may take at most ``run.hang_after`` seconds."""

SLOW_PHASE_TIMEOUT = 1800.0
"""Seconds that other activities may take, and the first step of a new module, which may compile."""

REASON_TIMEOUT = 15.0
"""How long a rank whose collective broke waits for another rank to report the reason."""

ACKNOWLEDGE_TIMEOUT = 3.0
"""How long a rank that failed waits for the others to read its report, before the launcher ends them."""

EXIT_TIMEOUT = 5.0
"""How long a rank that read of a failure has to leave its collective before it is ended."""

CLEANUP_TIMEOUT = 300.0
"""How long a rank may take to write its results and exit after its run has failed."""

COLLECTIVE_PATHS = ("torch/distributed/", "torch/nn/parallel/", "engine/loss_totals.py")
"""Source files in which a rank waits for others; with NCCL, that is where it reads the results of collectives."""

STORE_GONE = "the launcher or the first rank has ended"
"""The reason why the ranks' store does not answer."""


class PeerError(RunError):
    """Another rank failed. The message has its number, its place and the reason."""


class Watchdog:
    """Watches this rank's main thread through its ``monitor`` and, if there are several ranks, the next rank. A phase
    may take ``hang_after`` seconds."""

    def __init__(self, monitor: MemoryMonitor, rank: int, world_size: int, hang_after: float) -> None:
        self.monitor, self.rank, self.hang_after = monitor, rank, hang_after
        self.peers = Peers(rank, world_size, monitor, hang_after) if world_size > 1 else None
        self.heard: EndReason | None = None  # why the run ends, once a rank has reported it
        self._main = threading.current_thread()
        self._ending = self._closed = self._store_is_gone = False
        self._cause: BaseException | None = None
        self._still, self._last_look, self._position = 0.0, time.monotonic(), (0, 0)
        self._wake = threading.Event()
        if self.peers is not None:
            self.peers.send_heartbeat(self.place())
            threading.Thread(target=self._watch_store, args=(self.peers,), name="store watch", daemon=True).start()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def place(self) -> RankStatus:
        return RankStatus.from_monitor(self.rank, self.monitor)

    def root_error(self, error: BaseException) -> BaseException:
        """Return the exception to raise for ``error`` of the main thread: itself, or the failure of another rank. An
        error of this rank is printed and published to others, if there are any. Later errors do not replace the
        first."""
        if not self._ending:
            self._ending = True  # from here on, the thread no longer ends the process because of other ranks
            if not isinstance(error, RunStoppedError):  # all ranks raise Stopped
                self._cause = self._explained(error)
        return self._cause or error

    def _explained(self, error: BaseException) -> BaseException:
        place = self.place()
        try:
            told = self.peers.wait_for_end_reason(REASON_TIMEOUT) if self.peers and is_peer_loss(error) else None
            if told is not None:
                return PeerError(told.text)
            set_location(error, str(place))
            if self.peers is not None:
                if not isinstance(error, KeyboardInterrupt):
                    report(error)
                _leave_for_torchrun(error)
                cause = f"rank {self.rank} ended {place.without_rank()}: {describe_error(error)}"
                self.peers.announce_end(EndReason(cause))
                self.peers.wait_for_acknowledgements(ACKNOWLEDGE_TIMEOUT)
        except (RuntimeError, ValueError) as gone:  # the store has ended, and with it other ranks
            if is_peer_loss(error):
                return PeerError(f"{place}: {STORE_GONE} ({describe_error(gone)})")
            set_location(error, str(place))
        return error

    def close(self) -> None:
        """Stop watching: the run has ended on this rank."""
        self._closed = True
        self._wake.set()
        self._thread.join(ACKNOWLEDGE_TIMEOUT)
        if self.peers is not None:
            with suppress(RuntimeError, ValueError):  # the store may be gone already
                self.peers.send_heartbeat(self.place(), leaving=True)

    def _run(self) -> None:
        try:
            # The checks are frequent until the next rank was seen, as it may own the store.
            while not self._wake.wait(POLL_INTERVAL if not self.peers or self.peers.knows_next else POLL_INTERVAL / 10):
                if self.peers is not None:
                    self._look_at_peers(self.peers)
                self._look_at_self()
        except (RuntimeError, ValueError) as error:  # from the store
            self._store_is_gone = True
            self._wait_for_main(EXIT_TIMEOUT)
            if not (self._closed or self._ending):
                self._end(f"{self.place()}: {STORE_GONE} ({describe_error(error)})")

    def _watch_store(self, peers: Peers) -> None:
        """Detect a store that does not answer. A separate thread: a suspended store blocks every caller forever."""
        silent = answers = 0
        while not (self._wake.wait(POLL_INTERVAL) or self._store_is_gone):
            silent = silent + 1 if peers.answers == answers else 0
            answers = peers.answers
            if silent >= MAX_MISSED_HEARTBEATS:
                print_error(f"{self.place()}: {peers.diagnose_store().text}")
                self._leave()

    def _look_at_peers(self, peers: Peers) -> None:
        peers.send_heartbeat(self.place())
        if (wrong := peers.check_next_rank()) is not None:
            peers.announce_end(wrong)
        told = peers.end_reason()
        if told is None or self.heard is not None:
            return
        self.heard = told
        if not told.is_stopped:
            # The rank that ended closes its connections, which ends the collective in which the main thread waits.
            self._wait_for_main(EXIT_TIMEOUT)
        if not (self._closed or self._ending):
            self._end(told.text)
        peers.kill_stopped()

    def _look_at_self(self) -> None:
        now, place = time.monotonic(), self.place()
        # Do not count the time during which the process was stopped as a hang.
        self._still += min(now - self._last_look, 2 * POLL_INTERVAL)
        self._last_look = now
        if place.progress_key != self._position:
            self._position, self._still = place.progress_key, 0.0
        if self._ending:  # this rank may still wait in a collective for a rank that failed elsewhere
            if self._still > CLEANUP_TIMEOUT and not self._closed:
                self._end(f"{place}: the run has failed, but this rank does not exit", stack=True)
            return
        is_usual = place.activity in HANG_CHECKED_PHASES and not self.monitor.fresh
        if self._still < (self.hang_after if is_usual else max(self.hang_after, SLOW_PHASE_TIMEOUT)):
            return
        if self.peers is not None and (other := self._waits_for(self.peers, place)):
            # The other rank reports the hang itself, if it can.
            if self.peers.wait_for_end_reason(EXIT_TIMEOUT) is not None:
                self._look_at_peers(self.peers)
                return
            text = f"{place}: {other}, for {self._still:.0f} s now"
        else:
            text = f"{place}: no progress for {self._still:.0f} s"
        if self.place().progress_key == place.progress_key and not (self._ending or self._closed):
            self._end(text, stack=True)

    def _waits_for(self, peers: Peers, place: RankStatus) -> str | None:
        """Describe the rank for which this rank waits; ``None`` if this rank itself takes long."""
        behind = peers.slowest_place()
        if behind is not None and behind.progress_key < place.progress_key:
            return f"waits for rank {behind.rank}, which is {behind.without_rank()}"
        frame = sys._current_frames().get(self._main.ident or 0)
        innermost = frame.f_code.co_filename if frame is not None else ""
        return "waits for other ranks" if any(part in innermost for part in COLLECTIVE_PATHS) else None

    def _wait_for_main(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (self._ending or self._wake.wait(POLL_INTERVAL / 4)):
            if self.peers is not None:
                with suppress(RuntimeError, ValueError):
                    self.peers.send_heartbeat(self.place())

    def _end(self, text: str, stack: bool = False) -> None:
        """Report ``text`` and end the process, even if its main thread is blocked."""
        print_error(text)
        if stack:
            frame = sys._current_frames().get(self._main.ident or 0)
            print("".join(traceback.format_stack(frame)), file=sys.stderr, flush=True)
        if self.peers is not None and self.heard is None:
            with suppress(RuntimeError, ValueError):
                self.peers.announce_end(EndReason(text))
                self.peers.wait_for_acknowledgements(ACKNOWLEDGE_TIMEOUT)
        self._leave()

    def _leave(self) -> None:
        if self.peers is not None:
            self.peers.kill_stopped()
        sys.stdout.flush()
        os._exit(1)


def _leave_for_torchrun(error: BaseException) -> None:
    """Write the file from which torchrun's report takes the first failure and its traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not isinstance(error, RecipeError | RunError):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        with open(path, "r+") as file:
            content = json.load(file)
            file.seek(0)
            file.truncate()
            json.dump(redact_value(content), file)
