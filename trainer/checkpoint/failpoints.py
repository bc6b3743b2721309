"""Places in the writing of a checkpoint where a test lets the process be killed.

``TRAINER_FAILPOINT="before name@3@1"`` kills rank 1 the third time that it comes to that place. Without the variable a
failpoint does nothing.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

VARIABLE = "TRAINER_FAILPOINT"
NAMES = (
    "before tensors",
    "after tensors",
    "after sign",
    "before manifest",
    "before name",
    "after name",
    "after rotation",
)
_PASSED: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Kill this process, if the variable says so."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    place, time, rank = wanted.split("@")
    if place == name and rank == (os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"):
        _PASSED[name] += 1
        if _PASSED[name] == int(time):
            os.kill(os.getpid(), signal.SIGKILL)
