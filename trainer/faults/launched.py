"""The ranks that Fabric has started from this process: it does not end before them."""

from __future__ import annotations

import atexit
import subprocess
import time
from contextlib import suppress

from lightning.fabric import Fabric

SECONDS_TO_END = 15.0

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
