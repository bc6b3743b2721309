"""Places in the writing of a checkpoint where a test lets the process be killed.

``TRAINER_FAILPOINT="before name@3@1"`` kills rank 1 the third time that it comes to that place. Without the variable a
failpoint does nothing, and a run that is started with one that names no place is refused: it is nobody's by accident.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

from trainer.errors import require

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


def require_failpoint() -> None:
    """Refuse a variable that says nothing of the kind, before a save would end with it.

    Raises:
        RecipeError: saying what it must be.
    """
    wanted = os.environ.get(VARIABLE)
    require(
        wanted is None or re.fullmatch(rf"({'|'.join(NAMES)})@\d{{1,9}}@\d{{1,9}}", wanted) is not None,
        f"{VARIABLE}={wanted!r} in the environment is for tests that kill a run as it saves, and names no place of "
        "trainer/checkpoint/failpoints.py: unset it",
    )


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
