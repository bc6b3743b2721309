"""Handles signals that ask a run to stop, and ends ranks together before the watchdog runs."""

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
from trainer.system.error_reports import print_error


def stop_signals() -> list[int]:
    """Return the signals sent by a scheduler, the user, Slurm's ``--signal`` and a closed terminal. SIGHUP is left out
    if it is ignored, as under ``nohup``."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, *hangup]


def write_stderr(text: str) -> None:
    """Write a line to standard error from within a signal handler; the terminal may be gone. ``print`` is not
    reentrant: the signal may have interrupted one."""
    with suppress(OSError, ValueError):  # ValueError: stderr is closed
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())


def requeue_before_training() -> None:
    """Make a task of a Slurm job that is asked to stop before training end with ``EXIT_REQUEUE``, so that a preemption
    does not fail the job. :class:`StopSignals` takes over when training begins."""
    if "SLURM_JOB_ID" in os.environ and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    write_stderr(f"{signal.Signals(number).name} received before training: there is nothing to save")
    os._exit(EXIT_REQUEUE)


class StopSignals:
    """A context in which the first of :func:`stop_signals` is stored in ``received``; a second one ends the process.

    A second SIGHUP does nothing. Only the main thread can handle signals; in another thread ``received`` stays
    ``None``. Forked processes keep the default effects: see :func:`trainer.system.processes.detach_from_rank`.

    Args:
        first: whether this process prints the message.
        expected: returns whether a signal is the launcher's reaction to a failure that is already reported.
    """

    def __init__(self, first: bool = True, expected: Callable[[], bool] = lambda: False) -> None:
        self.first, self.expected = first, expected
        self.received: str | None = None
        # True once everything is saved, or another rank has failed, and all ranks are leaving. A SIGTERM is then the
        # launcher's reaction to the first rank that left. It must not keep this one from writing results or its reason.
        self.leaving = False
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._before and self.leaving and "TORCHELASTIC_RUN_ID" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, before it sets its own handlers
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.leaving and number == signal.SIGTERM:
            return
        if self.received is not None:
            if number != signal.SIGHUP:  # a closed terminal sends it twice, which is not a second request
                os._exit(128 + number)
            return
        self.received = signal.Signals(number).name
        if self.first and not self.expected():
            text = "saving a checkpoint at the end of this step, then exiting; a second signal exits at once"
            write_stderr(f"{self.received} received: {text}")


# The end of the first rank: not before the ranks that Fabric started from it, and not long after one of them failed.

POLL_INTERVAL = 0.2
KILL_TIMEOUT = 15.0

LEAVE_TIMEOUT = 30.0  # how long leaving the process group may take
FAIL_TIMEOUT = 10.0
"""How long this rank has to end by itself when another rank has failed: all ranks may have the same error."""

_children: list[subprocess.Popen] = []
_watches: list[StartupWatch] = []


class StartupWatch:
    """Ends this rank when a rank that it started ends before the run's watchdog has begun, which needs the ranks'
    store. Empties Fabric's list ``started``, because its observer would kill this process without a message."""

    def __init__(self, started: list[subprocess.Popen]) -> None:
        self.started, self.ranks = started, list[subprocess.Popen]()
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="start watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching and report a rank that was killed just now, perhaps the reason why this process ends."""
        self.stopped.set()
        self._thread.join(KILL_TIMEOUT)
        if killed := self._describe_exit()[0]:
            print_error(f"{killed} before training: nothing is lost")

    def _run(self) -> None:
        failed_at = math.inf
        while not self.stopped.wait(POLL_INTERVAL):
            killed, failed = self._describe_exit()
            if failed:
                failed_at = min(failed_at, time.monotonic())
            if (killed or time.monotonic() - failed_at > FAIL_TIMEOUT) and not self.stopped.is_set():
                print_error(f"{killed or failed} before training: nothing is lost")
                for child in self.ranks:
                    child.kill()
                os._exit(1)

    def _describe_exit(self) -> tuple[str, str]:
        while self.started:
            self.ranks.append(self.started.pop(0))
            _children.append(self.ranks[-1])
        killed = failed = ""
        for rank, child in enumerate(self.ranks, start=1):
            code, name = child.poll(), f"rank {rank} (pid {child.pid})"
            if code is not None and code < 0:
                killed = f"{name} was killed by {signal.Signals(-code).name}"
            elif code:
                failed = f"{name} ended with exit code {code}"
        return killed, failed


def begin_startup_watch(started: list[subprocess.Popen]) -> None:
    """Start watching the ranks that Fabric starts from this process."""
    end_startup_watch()
    _watches.append(StartupWatch(started))
    atexit.register(wait_for_children)


def end_startup_watch() -> None:
    """Stop the watch, because the watchdog has begun or this process ends."""
    while _watches:
        _watches.pop().stop()


def wait_for_children() -> None:
    """Wait for the ranks that were started here to finish, and kill those that do not."""
    end_startup_watch()
    until = time.monotonic() + KILL_TIMEOUT
    while _children:
        child = _children.pop()
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, until - time.monotonic()))
        if child.poll() is None:
            child.kill()


@contextmanager
def exit_after(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer: leaving a NCCL group waits for collectives that others have left."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
