"""Whether all machines see the same run directory: found out before training, not when the first checkpoint fails."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer.agreement import from_all
from trainer.errors import RecipeError, require
from trainer.session import Session

PREFIX = ".shared-"
SECONDS_TO_SEE = 10.0
"""How long a file may take to be seen on another machine."""

SECONDS_BETWEEN_LOOKS = 0.2


def require_shared(session: Session, run_dir: Path) -> None:
    """Have the first rank leave a file in ``run_dir`` that every other machine looks for and answers. A collective.

    One rank of each machine looks; on a single machine there is nothing to find out.

    Raises:
        RecipeError: on all ranks alike, naming the machines that see another directory, or cannot write to it.
    """
    fabric = session.fabric
    on_other_machine = fabric.local_rank == 0 and not session.is_first
    (others,) = session.agreement.total([float(on_other_machine)])
    if not others:
        return
    token = session.on_first(partial(_leave, run_dir))
    problem = _answer(run_dir, token) if on_other_machine else None
    problems = from_all(fabric, problem)
    if session.is_first:
        for path in run_dir.glob(f"{token}*"):
            path.unlink(missing_ok=True)
    found = [problem for problem in problems if problem is not None]
    here = session.on_first(socket.gethostname)
    require(
        not found,
        f"run.dir={run_dir} is not one directory for all machines: {'; '.join(found)}, where {here} has made it: "
        "choose a directory on a file system that all of them share",
    )


def _leave(run_dir: Path) -> str:
    """Make the file; its name."""
    token = PREFIX + secrets.token_hex(8)
    try:
        (run_dir / token).touch()
    except OSError as error:
        raise RecipeError(
            f"run.dir={run_dir} cannot be written to ({error.strerror}): choose another directory"
        ) from error
    return token


def _answer(run_dir: Path, token: str) -> str | None:
    """Look for the file, and leave one beside it; what is wrong, if anything is."""
    here = socket.gethostname()
    until = time.monotonic() + SECONDS_TO_SEE
    while not _is_seen(run_dir, token):
        if time.monotonic() > until:
            return f"{here} does not see what the first rank wrote there"
        time.sleep(SECONDS_BETWEEN_LOOKS)
    try:
        (run_dir / f"{token}-{here}").touch()
    except OSError as error:
        return f"{here} cannot write there ({error.strerror})"
    return None


def _is_seen(run_dir: Path, token: str) -> bool:
    """NFS asks its server when a directory is listed; a name that was not there it may believe missing for 30 s."""
    with suppress(OSError):
        return token in os.listdir(run_dir)
    with suppress(OSError):
        os.listdir(run_dir.parent)
    return False
