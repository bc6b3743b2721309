"""Forked processes: jobs some at once, and whatever a process has left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainer.system.child_jobs import run_in_children
from trainer.system.processes import end_with_parent

PR_SET_CHILD_SUBREAPER = 36
"""Of prctl(2)."""

SECONDS_BETWEEN_LOOKS = 0.005


def fork(work: Callable[[], int], output: Path) -> int:
    """Run ``work`` in a process of its own, which prints to ``output`` and exits with what is returned; its pid.

    Nothing of this process is torn down in it: no exit handler runs, and it ends when this process does.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    starter = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        end_with_parent(starter)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        sys.stdout, sys.stderr = (os.fdopen(standard, "w", 1, closefd=False) for standard in (1, 2))
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):  # the disk may be full
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def in_forks(jobs: Sequence[Callable[[], Any]], at_once: int) -> Iterator[tuple[int, Any]]:
    """``run_in_children`` for jobs that start runs: what these leave behind is the job's, and one that breaks ends
    all."""
    for number, result in run_in_children([partial(_starting_runs, job) for job in jobs], at_once, sees_gpu=True):
        if isinstance(result, Exception):
            raise result
        yield number, result


def _starting_runs(job: Callable[[], Any]) -> Any:
    multiprocessing.current_process().daemon = False  # what is forked from here may start processes, too
    # From here on, what a process forked from this one leaves behind becomes a child of this one.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    return job()


def children(pid: int) -> list[int]:
    """The processes that ``pid``, or one of its threads, has started; empty when there is no such process."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            found += map(int, (thread / "children").read_text().split())
    return found


def living_children(seconds: float) -> list[int]:
    """The children of this process that are alive after ``seconds``; returns as soon as there are none."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in children(os.getpid()) if not reaped(pid)]) and time.monotonic() < until:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return left


def reaped(pid: int) -> bool:
    """Whether the child ``pid`` has ended, which is then forgotten."""
    return os.waitpid(pid, os.WNOHANG)[0] == pid
