"""Processes of this machine: which they are, whether they live, and that none outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""

SUPERVISOR = "TRAINER_SUPERVISOR"
"""Variable in which ``trainer run`` tells the ranks that it starts which process it is."""

MAIN = Path(__file__).with_name("__main__.py")
THIS_PACKAGE = f"""\
import sys
sys.path[:1] = [{str(MAIN.parent.parent)!r}, *(path for path in sys.path[:1] if path)]
import trainer
del sys.path[0]
"""
"""For ``python -c``, which puts the working directory first, as an empty word, unless it was told not to."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STOPPED, GONE = "T", "ZX"
"""States in /proc/PID/stat: stopped by a signal; ended, and perhaps not yet waited for."""


def own_command(*words: str) -> list[str]:
    """What starts this package's command line in a process of its own, as ``trainer`` does.

    ``python -m trainer`` would import from the working directory before all else: a trainer.py or random.py that lies
    there by accident, or came with somebody's files. Python has a flag against that from 3.11 on only.
    """
    return [sys.executable, str(MAIN), *words]


def own_code(code: str) -> list[str]:
    """The same for Python code of ours, which finds this package."""
    return [sys.executable, "-c", THIS_PACKAGE + code]


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_helper() -> None:
    """What a process that was forked from a rank does first: signals to the rank are not for it, and it ends with it.

    Ctrl-C, and torchrun's own end, reach every process of the rank's group. A helper that died of that would take from
    the rank what it needs to finish its step, so it leaves the group; the kernel ends it when the rank ends.
    """
    for name in ("SIGINT", "SIGUSR1"):  # a rank's own handlers are not for it; torch has set that of SIGTERM
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if sys.platform == "linux":
        os.setpgrp()
        end_with_parent()


@lru_cache(maxsize=1)
def boot_id() -> str:
    """What tells this start of this machine from any other; empty where the system does not say."""
    return BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""


@dataclass(frozen=True)
class ProcessId:
    """A process, told from a later one with the same number.

    Args:
        host: the machine's name.
        pid: its number.
        boot_id: of the machine's kernel.
        namespace: in which the number holds; containers have their own.
        began: when it started, in the kernel's ticks since boot.
    """

    host: str
    pid: int
    boot_id: str
    namespace: str
    began: int

    @classmethod
    def own(cls) -> ProcessId:
        """This process."""
        pid = os.getpid()
        found = _stat(pid)
        return cls(socket.gethostname(), pid, boot_id(), _namespace(), found[1] if found else 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def is_here(self) -> bool:
        """Whether this process can see it: it is of the same machine and container, and Linux tells."""
        return bool(self.boot_id and self.namespace) and (self.boot_id, self.namespace) == (boot_id(), _namespace())

    def state(self) -> str:
        """``running``, ``stopped`` by a signal, or ``gone``; only for one that is here."""
        found = _stat(self.pid)
        if found is None or found[1] != self.began or found[0] in GONE:
            return "gone"
        return "stopped" if found[0] == STOPPED else "running"

    def kill(self) -> None:
        """End it at once, if it is here and still the same."""
        if self.is_here() and self.state() != "gone":
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start of a process; ``None`` when there is none of that number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return fields[0], int(fields[19])


@lru_cache(maxsize=1)
def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
