"""One run a directory: a second one is refused."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError
from trainer.system.environment import number
from trainer.system.files import naming, open_own, parsed_object
from trainer.system.processes import ProcessId, boot_id

NAME = ".run.lock"
MOST_BYTES = 4096

NO_ID = "none"
"""What torchrun calls a rendezvous that was given no ``--rdzv-id``: it may be any."""

_held: set[Path] = set()
"""Locks of this process. The kernel would let it take one twice, and drop it when the second is closed."""


class RunLock:
    """The lock of an existing run directory, for its first rank; a run and its supervisor have one each, by ``name``.

    The kernel holds it (a POSIX record lock on the file): it ends with the process, however that ends, and a process
    that is forked from this one does not inherit it. Between machines that share a directory without sharing its
    locks, what is written in the file decides: host, pid, boot_id, when it was taken and by which job of Slurm.
    """

    def __init__(self, run_dir: Path, name: str = NAME) -> None:
        self.path = Path(os.path.realpath(run_dir)) / name
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock; return a line that says so when it was that of a run that has died.

        A RecipeError names the run that holds it, or why there can be no lock.
        """
        if self.path in _held:
            raise self._in_use(f"another run of this process (pid {os.getpid()})")
        try:
            descriptor = self._locked()
        except OSError as error:
            raise RecipeError(
                f"run.dir={self.path.parent} cannot be locked ({self.path.name}: {error.strerror}): choose a directory "
                "of your own, on a disk that can lock files"
            ) from error
        before = _read(descriptor)
        if before is not None and _may_live(before):
            os.close(descriptor)
            fix = f"choose another directory, or remove {self.path} if that run has ended"
            raise self._in_use(f"the run of {_described(before)}, another machine: {fix}")
        with naming(self.path):
            os.ftruncate(descriptor, 0)
            owner = ProcessId.own().to_dict() | {"started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            os.pwrite(descriptor, json.dumps(owner | _slurm_job() | _rendezvous()).encode(), 0)
            os.fsync(descriptor)
        _held.add(self.path)
        self._descriptor = descriptor
        return None if before is None else f"the run of {_described(before)} has died: its lock is taken over"

    def release(self) -> None:
        """Give the lock back; nothing if it is not held."""
        if self._descriptor is None:
            return
        self.path.unlink(missing_ok=True)  # before it is free: what another process opens from here on is its own
        os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self.path)

    def _in_use(self, by: str) -> RecipeError:
        return RecipeError(f"run.dir={self.path.parent} is in use by {by}")

    def _locked(self) -> int:
        """A locked descriptor of the file that is at the path now, and not of one that its owner has removed."""
        while True:
            descriptor = open_own(self.path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    return descriptor
            except (BlockingIOError, PermissionError) as error:
                owner = _read(descriptor)
                os.close(descriptor)
                name = _described(owner) if owner else "a process that has just begun"
                fix = "wait for its end, stop it, or choose another directory"
                raise self._in_use(f"the run of {name}: {fix}") from error
            except FileNotFoundError:
                pass  # removed between the two looks
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


def _slurm_job() -> dict[str, Any]:
    """The job of this process, and how often Slurm has started it again; nothing outside of one."""
    if "SLURM_JOB_ID" not in os.environ:
        return {}
    cluster, job = (os.environ.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID"))
    return {"slurm_job": f"{cluster}:{job}", "slurm_restarts": number("SLURM_RESTART_COUNT", 0)}


def _rendezvous() -> dict[str, Any]:
    """The ``--rdzv-id`` of the torchrun that has started this process; nothing without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", NO_ID)
    return {} if name == NO_ID else {"rendezvous": name}


def _read(descriptor: int) -> dict[str, Any] | None:
    """Who wrote the file; ``None`` when it is empty or was not written to its end."""
    return parsed_object(os.pread(descriptor, MOST_BYTES, 0), MOST_BYTES)


def _may_live(owner: dict[str, Any]) -> bool:
    """Whether an owner whose lock is free may be alive all the same: on a machine whose locks are not seen here.

    On this kernel a free lock says that its owner is dead, and a host of this name with another boot_id was this one
    before it was started again. Slurm starts a job again, on whichever node, when it has ended. torchrun goes on
    without a machine only when that is gone, or cut off: its ranks have ended then, or end by themselves before the
    others have started.
    """
    own, job = _rendezvous(), _slurm_job()
    before = range(job.get("slurm_restarts", 0))  # what a damaged file says is none of them
    if job and owner.get("slurm_job") == job["slurm_job"] and owner.get("slurm_restarts") in before:
        return False
    if own and owner.get("rendezvous") == own["rendezvous"]:
        return False
    same_kernel = bool(boot_id()) and owner.get("boot_id") == boot_id()
    return not same_kernel and owner.get("host") != socket.gethostname()


def _described(owner: dict[str, Any]) -> str:
    return f"pid {owner.get('pid')} on {owner.get('host')} since {owner.get('started')}"
