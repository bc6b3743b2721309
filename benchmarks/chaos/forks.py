"""Forked processes: jobs some at once, and whatever a process has left behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

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


def in_forks(jobs: Sequence[Callable[[], Any]], folder: Path, at_once: int) -> Iterator[tuple[int, Any]]:
    """Do ``jobs`` in processes of their own, some at once; yield the number of each and its result, as they end.

    Args:
        jobs: each returns what JSON can hold.
        folder: for results and what is printed.
        at_once: processes at most.

    Raises:
        RuntimeError: when a job ended without a result: with what it printed.
    """
    waiting, running = list(enumerate(jobs)), dict[int, int]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, job = waiting.pop(0)
                result = folder / f"{number}.json"
                running[fork(partial(_work, job, result), folder / f"{number}.txt")] = number
            pid, _ = os.wait()
            number = running.pop(pid)
            result = folder / f"{number}.json"
            if not result.exists():
                raise RuntimeError(f"a trial broke:\n{(folder / f'{number}.txt').read_text()}")
            yield number, json.loads(result.read_text())
    finally:
        for pid in running:  # what they have started ends with them
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work(job: Callable[[], Any], result: Path) -> int:
    adopt_orphans()
    answer = json.dumps(job())
    result.write_text(answer)
    return 0


def adopt_orphans() -> None:
    """From here on, what a process forked from this one leaves behind becomes a child of this one."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


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
