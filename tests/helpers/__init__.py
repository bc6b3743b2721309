"""What the tests share: problems with known answers, pools of ranks, runs, files that would do harm."""

import time
from collections.abc import Callable
from pathlib import Path

LONG = 300.0
"""Seconds that what a test waits for may take: it ends in a few, and in a hundred on a machine with much else to do."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` is true; fail after ``LONG`` seconds."""
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until, "the condition is still false"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
