"""The end of a rank: not before those that Fabric has started from it, and not after others have left it alone."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from trainer.faults.reports import say
from trainer.processes import ProcessId

SECONDS_TO_END = 15.0

SECONDS_TO_LEAVE = 30.0
"""How long leaving the process group may take."""

SECONDS_BETWEEN_LOOKS = 0.2

SECONDS_TO_FAIL = 10.0
"""How long this rank has to end by itself when another has ended with an error, which may be everybody's."""

_children: list[subprocess.Popen] = []
_watches: list[StartWatch] = []


class StartWatch:
    """Ends this rank when another one ends before the run's own watch has begun: it may wait for that one for ever.

    Fabric's own observer kills this process without a word when a rank that was started from it has failed, within five
    seconds; it observes the list that is emptied here.

    Args:
        started: by Fabric, from this process; it grows.
        others: ranks that something else has started on this machine.
    """

    def __init__(self, started: list[subprocess.Popen], others: Mapping[int, ProcessId]) -> None:
        self.started, self.others = started, dict(others)
        self.ranks: list[subprocess.Popen] = []
        self.stopped = threading.Event()
        self._failed_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="start watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The run has a watch of its own, or this process ends: perhaps because of a rank that was killed just now."""
        self.stopped.set()
        self._thread.join(SECONDS_TO_END)
        self._adopt()
        if killed := self._ended()[0]:
            say(f"{killed} before training: nothing is lost")

    def _run(self) -> None:
        while not self.stopped.wait(SECONDS_BETWEEN_LOOKS):
            self._adopt()
            killed, failed = self._ended()
            if failed and self._failed_at is None:
                self._failed_at = time.monotonic()
            late = self._failed_at is not None and time.monotonic() - self._failed_at > SECONDS_TO_FAIL
            if (killed or late) and not self.stopped.is_set():
                say(f"{killed or failed} before training: nothing is lost")
                for child in self.ranks:
                    child.kill()
                os._exit(1)

    def _adopt(self) -> None:
        while self.started:
            child = self.started.pop(0)
            self.ranks.append(child)
            _children.append(child)

    def _ended(self) -> tuple[str, str]:
        """What is said of a rank that was killed, and of one that has failed; empty where there is none."""
        killed = failed = ""
        for rank, child in enumerate(self.ranks, start=1):
            code, name = child.poll(), f"rank {rank} (pid {child.pid})"
            if code is not None and code < 0:
                killed = f"{name} was killed by {signal.Signals(-code).name}"
            elif code:
                failed = f"{name} ended with exit code {code}"
        for rank, process in self.others.items():
            if process.is_here() and process.state() == "gone":
                failed = f"rank {rank} (pid {process.pid}) was killed or has failed"
        return killed, failed


def watch_start(started: list[subprocess.Popen], others: Mapping[int, ProcessId]) -> None:
    """Begin to watch the ranks that Fabric starts from this process, and others of this machine."""
    end_start_watch()
    _watches.append(StartWatch(started, others))
    atexit.register(wait_for_children)


def have_started() -> None:
    """All ranks have met and are prepared: only those that were started from this process are watched any more."""
    for watch in _watches:
        watch.others = {}


def end_start_watch() -> None:
    """A watch of the run has begun, or this process ends."""
    while _watches:
        _watches.pop().stop()


def wait_for_children() -> None:
    """Let them finish what they do and say, and kill what does not end."""
    end_start_watch()
    until = time.monotonic() + SECONDS_TO_END
    while _children:
        child = _children.pop()
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, until - time.monotonic()))
        if child.poll() is None:
            child.kill()


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End the process should this take longer: a GPU's process group waits for collectives that others have left."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
