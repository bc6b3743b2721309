"""Signals that ask a run to stop: noted, and answered at the end of the step."""

from __future__ import annotations

import atexit
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from trainer.errors import EXIT_REQUEUE
from trainer.system.reports import say


def stop_signals() -> list[int]:
    """Of a scheduler that wants the machine back, a person, Slurm's ``--signal``, a terminal that is closed.

    Not SIGHUP where that is ignored, as ``nohup`` has it.
    """
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *hangup]


def is_hangup(number: int) -> bool:
    """Whether a terminal sends this when it is closed: its shell sends another one, which asks for nothing more."""
    return number == signal.SIGHUP


def tell(text: str) -> None:
    """Write a line to standard error, from within a handler: the terminal may be gone, and the signal be its last.

    Not print: the signal may have come in the middle of one, whose buffer is not to be entered again.
    """
    with suppress(OSError, ValueError):  # the latter of one that is closed
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())


def leave_before_training() -> None:
    """In a job of Slurm, a task that is asked to stop before it trains ends with ``EXIT_REQUEUE``: nothing is lost.

    A preemption, or a time limit, may come while libraries are imported and data prepared; without this the job would
    fail. :class:`StopSignals` takes over when training begins.
    """
    if "SLURM_JOB_ID" in os.environ and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    tell(f"{signal.Signals(number).name} received before training: there is nothing to save")
    os._exit(EXIT_REQUEUE)


class StopSignals:
    """While it lasts, the first of :func:`stop_signals` is noted in ``received``; a second one ends the process.

    Not a second SIGHUP. Only the main thread can do this; elsewhere ``received`` stays ``None``. A process that is
    forked meanwhile has the signals' own effects: see :func:`trainer.system.processes.become_helper`.

    Args:
        first: whether this process is the one that tells the person.
        expected: whether a signal is the launcher's answer to a failure, which is reported already, and not a request.
    """

    def __init__(self, first: bool = True, expected: Callable[[], bool] = lambda: False) -> None:
        self.first, self.expected = first, expected
        self.received: str | None = None
        # All is saved and all ranks leave. A SIGTERM is then what a launcher sends the others when one rank has left,
        # which must not keep the first from writing its results.
        self.leaving = False
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._before and self.leaving and "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # forked, and not yet what it is to become
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.leaving and number == signal.SIGTERM:
            return
        if self.received is not None:
            if not is_hangup(number):
                os._exit(128 + number)
            return
        self.received = signal.Signals(number).name
        if self.first and not self.expected():
            text = "saving a checkpoint at the end of this step, then leaving; once more leaves at once"
            tell(f"{self.received} received: {text}")


# The end of a rank: not before those that Fabric has started from it, and not after others have left it alone.

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_END = 15.0

SECONDS_TO_LEAVE = 30.0  # how long leaving the process group may take
SECONDS_TO_FAIL = 10.0
"""How long this rank has to end by itself when another has ended with an error, which may be everybody's."""

_children: list[subprocess.Popen] = []
_watches: list[StartWatch] = []


class StartWatch:
    """Ends this rank when one that it has started ends before the run's own watch has begun.

    Fabric's own observer kills this process without a message when a rank that was started from it has failed, within
    five seconds. It observes the list of those that it has ``started``, which grows, and is emptied here.
    """

    def __init__(self, started: list[subprocess.Popen]) -> None:
        self.started = started
        self.ranks: list[subprocess.Popen] = []
        self.stopped = threading.Event()
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
        failed_at = math.inf
        while not self.stopped.wait(SECONDS_BETWEEN_LOOKS):
            self._adopt()
            killed, failed = self._ended()
            if failed:
                failed_at = min(failed_at, time.monotonic())
            if (killed or time.monotonic() - failed_at > SECONDS_TO_FAIL) and not self.stopped.is_set():
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
        return killed, failed


def watch_start(started: list[subprocess.Popen]) -> None:
    """Begin to watch the ranks that Fabric starts from this process."""
    end_start_watch()
    _watches.append(StartWatch(started))
    atexit.register(wait_for_children)


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
