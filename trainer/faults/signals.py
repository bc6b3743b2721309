"""Signals that ask a run to stop: noted, and answered at the end of the step."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from trainer.errors import EXIT_REQUEUE

STOP_SIGNALS = tuple(name for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""Of a scheduler that wants the machine back, of a person, of Slurm's ``--signal``, of a terminal that is closed."""


def stop_signals() -> list[int]:
    """Those that ask this process to stop: not SIGHUP where that is ignored, as ``nohup`` has it."""
    numbers = [getattr(signal, name) for name in STOP_SIGNALS]
    return [number for number in numbers if not (is_hangup(number) and signal.getsignal(number) == signal.SIG_IGN)]


def is_hangup(number: int) -> bool:
    """Whether a terminal sends this when it is closed: its shell sends another one, which asks for nothing more."""
    return number == getattr(signal, "SIGHUP", None)


def tell(text: str) -> None:
    """Write a line to standard error, from within a handler: the terminal may be gone, and the signal be its last.

    Not print: the signal may have come in the middle of one, whose buffer is not to be entered again.
    """
    with suppress(OSError, ValueError):  # the latter of one that is closed
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{text}\n".encode())


def leave_before_training() -> None:
    """In a job of Slurm, a task that is asked to stop before it trains ends with ``EXIT_REQUEUE``: nothing is lost.

    A preemption, or a time limit, may come while libraries are imported and data prepared; without this the signal
    would end the task as a failure, and the job with it. :class:`StopSignals` takes over when training begins.
    """
    if "SLURM_JOB_ID" in os.environ and threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGUSR1"):
            signal.signal(getattr(signal, name), _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    tell(f"{signal.Signals(number).name} received before training: there is nothing to save")
    os._exit(EXIT_REQUEUE)


class StopSignals:
    """While it lasts, the first of :func:`stop_signals` is noted in ``received``; a second one ends the process.

    Not a second SIGHUP: the kernel and the shell both send one when a terminal is closed.

    Only the main thread can do this; elsewhere it does nothing, and ``received`` stays ``None``. A process that is
    forked meanwhile has the signals' own effects: see :func:`trainer.processes.become_helper`.

    Args:
        first: whether this process is the one that tells the person.
        expected: whether a signal is the launcher's answer to a failure, which is reported already, and not a request.
    """

    def __init__(self, first: bool = True, expected: Callable[[], bool] = lambda: False) -> None:
        self.first, self.expected = first, expected
        self.received: str | None = None
        self.leaving = False
        """Whether all is saved and all ranks leave. A SIGTERM is then what a launcher sends the others when one rank
        has left: it must not keep the first from writing its results."""
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            if is_hangup(number):
                return
            os._exit(128 + number)
        self.received = signal.Signals(number).name
        if self.first and not self.expected():
            text = "saving a checkpoint at the end of this step, then leaving; once more leaves at once"
            tell(f"{self.received} received: {text}")
