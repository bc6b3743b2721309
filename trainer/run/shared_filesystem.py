"""Check before training, not when the first checkpoint fails, that all machines see the same run directory."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from lightning_fabric import Fabric

from trainer.errors import RecipeError
from trainer.run.collectives import all_gather_json, run_on_rank_zero

PREFIX = ".shared-"
PROBE_TIMEOUT = 10.0  # how long a file may take to appear on another machine
POLL_INTERVAL = 0.2


def require_shared_filesystem(fabric: Fabric, run_dir: Path) -> None:
    """Check that all machines share ``run_dir``. A collective.

    The first rank writes a file, which one rank of every other machine answers with another. Raise RecipeError on all
    ranks if a machine sees another directory or cannot write to it.
    """
    on_other_machine = fabric.local_rank == 0 and fabric.global_rank != 0
    if not any(all_gather_json(fabric, on_other_machine)):
        return
    token = run_on_rank_zero(fabric, partial(_leave, run_dir))
    problems = all_gather_json(fabric, _answer(run_dir, token) if on_other_machine else None)
    if fabric.global_rank == 0:
        for path in run_dir.glob(f"{token}*"):
            path.unlink(missing_ok=True)
    found = "; ".join(problem for problem in problems if problem is not None)
    here = run_on_rank_zero(fabric, socket.gethostname)
    if found:
        raise RecipeError(
            f"run.dir={run_dir} is not one directory for all machines: {found}; {here} created it: choose a directory "
            "on a file system that all machines share"
        )


def _leave(run_dir: Path) -> str:
    token = PREFIX + secrets.token_hex(8)
    if problem := _touch(run_dir / token):
        raise RecipeError(f"run.dir={run_dir} cannot be written to ({problem}): choose another directory")
    return token


def _answer(run_dir: Path, token: str) -> str | None:
    here, until = socket.gethostname(), time.monotonic() + PROBE_TIMEOUT
    while not _is_seen(run_dir, token):
        if time.monotonic() > until:
            return f"{here} does not see what the first rank wrote there"
        time.sleep(POLL_INTERVAL)
    problem = _touch(run_dir / f"{token}-{here}")
    return f"{here} cannot write there ({problem})" if problem else None


def _touch(path: Path) -> str | None:
    try:
        path.touch()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _is_seen(run_dir: Path, token: str) -> bool:
    """List the directory, because NFS then asks its server; it may cache a missing name for 30 s."""
    with suppress(OSError):
        return token in os.listdir(run_dir)
    with suppress(OSError):
        os.listdir(run_dir.parent)
    return False
