"""The lock of a run directory: a second run in the same directory is rejected."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from trainer.errors import RecipeError
from trainer.system.environment import read_int_variable
from trainer.system.files import add_path_to_errors, open_writable, parse_json_object
from trainer.system.processes import ProcessId, boot_id

NAME = ".run.lock"
MAX_LOCK_BYTES = 4096

NO_ID = "none"  # torchrun's default ID for a rendezvous without ``--rdzv-id``; it identifies no run

_held: set[Path] = set()
"""Locks of this process. The kernel would let a process lock a file twice and unlock it when one is closed."""


class RunLock:
    """The lock of an existing run directory, for its first rank. A run and its supervisor use different names.

    It is a POSIX record lock, so the kernel releases it when the process ends for any reason, and forks do not inherit
    it. Machines may share a directory but not its locks. Then the file's content decides: host, pid, boot_id, time and
    Slurm job of its owner.
    """

    def __init__(self, run_dir: Path, name: str = NAME) -> None:
        self.path = Path(os.path.realpath(run_dir)) / name
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock, or raise a RecipeError; if its last owner died, return a message about that."""
        if self.path in _held:
            raise self._in_use(f"another run of this process (pid {os.getpid()})")
        try:
            descriptor = self._locked()
        except OSError as error:
            why = f"run.dir={self.path.parent} cannot be locked ({self.path.name}: {error.strerror})"
            fix = "choose a directory that you own, on a disk that supports file locks"
            raise RecipeError(f"{why}: {fix}") from error
        before = _read(descriptor)
        if before is not None and _may_live(before):
            os.close(descriptor)
            fix = f"choose another directory, or remove {self.path} if that run has ended"
            raise self._in_use(f"the run of {_described(before)}, another machine: {fix}")
        with add_path_to_errors(self.path):
            os.ftruncate(descriptor, 0)
            owner = ProcessId.current().to_dict() | {"started": time.strftime("%Y-%m-%d %H:%M:%S %z")}
            os.pwrite(descriptor, json.dumps(owner | _slurm_job() | _rendezvous()).encode(), 0)
            os.fsync(descriptor)
        _held.add(self.path)
        self._descriptor = descriptor
        return None if before is None else f"the run of {_described(before)} has died: taking over its lock"

    def release(self) -> None:
        if self._descriptor is None:
            return
        self.path.unlink(missing_ok=True)  # before unlocking, so that the next process creates a new file
        os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self.path)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()

    def _in_use(self, by: str) -> RecipeError:
        return RecipeError(f"run.dir={self.path.parent} is in use by {by}")

    def _locked(self) -> int:
        """Return a locked descriptor of the file at the path, not of one that its owner has just removed."""
        while True:
            descriptor = open_writable(self.path, os.O_RDWR | os.O_CREAT)
            with ExitStack() as until:
                until.callback(os.close, descriptor)
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError) as error:
                    owner = _read(descriptor)
                    name = _described(owner) if owner else "a process that has just started"
                    fix = "wait until it ends, stop it, or choose another directory"
                    raise self._in_use(f"the run of {name}: {fix}") from error
                with suppress(FileNotFoundError):  # removed by its owner
                    if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                        until.pop_all()
                        return descriptor


def _slurm_job() -> dict[str, Any]:
    """Return the Slurm job of this process and its number of restarts; empty outside Slurm."""
    if "SLURM_JOB_ID" not in os.environ:
        return {}
    cluster, job = (os.environ.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID"))
    return {"slurm_job": f"{cluster}:{job}", "slurm_restarts": read_int_variable("SLURM_RESTART_COUNT", 0)}


def _rendezvous() -> dict[str, Any]:
    """Return the ``--rdzv-id`` of the torchrun that started this process; empty without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", NO_ID)
    return {} if name == NO_ID else {"rendezvous": name}


def _read(descriptor: int) -> dict[str, Any] | None:
    """Return the owner that wrote the file; ``None`` if the file is empty or incomplete."""
    return parse_json_object(os.pread(descriptor, MAX_LOCK_BYTES, 0), MAX_LOCK_BYTES)


def _may_live(owner: dict[str, Any]) -> bool:
    """Return whether an owner whose lock is free may still be alive on a machine whose locks are not visible here.

    With the same boot_id, a free lock means that its owner is dead. The same host name with another boot_id means that
    this machine has rebooted. Slurm restarts a job, on any node, only after it has ended. torchrun continues without
    a machine only if that machine is gone or cut off; its ranks end by themselves before the others have started.
    """
    own, job = _rendezvous(), _slurm_job()
    before = range(job.get("slurm_restarts", 0))  # a value from a damaged file is not in the range
    if job and owner.get("slurm_job") == job["slurm_job"] and owner.get("slurm_restarts") in before:
        return False
    if own and owner.get("rendezvous") == own["rendezvous"]:
        return False
    same_kernel = bool(boot_id()) and owner.get("boot_id") == boot_id()
    return not same_kernel and owner.get("host") != socket.gethostname()


def _described(owner: dict[str, Any]) -> str:
    return f"pid {owner.get('pid')} on {owner.get('host')} since {owner.get('started')}"
