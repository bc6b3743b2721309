"""The end of a rank: not before those that Fabric has started from it, and not after others have left it alone."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from lightning.fabric import Fabric

SECONDS_TO_END = 15.0

SECONDS_TO_LEAVE = 30.0
"""How long leaving the process group may take."""

_children: list[subprocess.Popen] = []


def adopt_children(fabric: Fabric) -> None:
    """Take over the ranks that Fabric has started from this process.

    Fabric's own observer kills this process without a word when one of them has failed, within five seconds, summary
    written or not; the watchdog notices sooner, and says why. It observes the list that is emptied here.
    """
    started = getattr(fabric.strategy.launcher, "procs", None)
    if started:
        _children.extend(started)
        started.clear()
        atexit.register(wait_for_children)


def wait_for_children() -> None:
    """Let them finish what they do and say, and kill what does not end."""
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
