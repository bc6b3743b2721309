"""Processes of this machine: which they are, whether they live, and that none outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from trainer.system.text import escaped

PR_SET_PDEATHSIG = 1  # of prctl(2)

SUPERVISOR = "TRAINER_SUPERVISOR"
"""Variable in which ``trainer run`` tells the ranks that it starts which process it is."""
LAUNCHER = "TRAINER_LAUNCHER"
"""Variable in which what starts ranks tells them the number of its process."""
BOUND = "TRAINER_RANK_BOUND"
"""Variable by which what a rank starts knows that torchrun's variables are the rank's, and that it is none itself."""

MAIN = Path(__file__).parents[1] / "__main__.py"
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

SECONDS_TO_CONNECT = 5.0
SECONDS_TO_VANISH = 5.0
MOST_PIDS = 2**22  # of Linux, on any machine
LONGEST_NAME = 255

_told: list[int] = []


def own_command(*words: str) -> list[str]:
    """What starts this package's command line in a process of its own, as ``trainer`` does.

    ``python -m trainer`` would import from the working directory before all else: a random.py that came with somebody's
    files, say. Python has a flag against that from 3.11 on only.
    """
    return [sys.executable, str(MAIN), *words]


def own_code(code: str) -> list[str]:
    """The same for Python code of ours, which finds this package."""
    return [sys.executable, "-c", THIS_PACKAGE + code]


def end_with_parent(starter: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, however that ends.

    Where the number of its ``starter`` is known, and that has ended before the kernel could be asked, it ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if starter is not None and _is_gone(starter):
            os._exit(1)


def end_with_launcher() -> None:
    """What a rank does before it imports anything that takes time: it ends with what started it, however that ends.

    A launcher that is killed while its ranks import would leave them behind, waiting for each other. Which process it
    is, it tells by :data:`LAUNCHER`; torchrun does not, and may have ended before the kernel could be asked: then its
    store is not there, or this process belongs to the one that inherits orphans. srun and Ray end their own.
    """
    told = os.environ.pop(LAUNCHER, None)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and BOUND not in os.environ
    if sys.platform != "linux" or (told is None and not by_torchrun):
        return
    os.environ[BOUND] = "1"
    if told is not None and not (told.isascii() and told.isdigit()):
        _leave(2, f"{LAUNCHER}={told!r} is not the number of a process: unset it")
    _told.extend([] if told is None else [int(told)])
    end_with_parent()
    if _is_gone(int(told)) if told is not None else _is_orphan():
        _leave(1, "what started this rank has ended")


def has_told_launcher() -> bool:
    """Whether what started this rank has told which process it is: that one ends all ranks when one is gone."""
    return bool(_told)


def _is_orphan() -> bool:
    """Whether the torchrun that started this process has ended."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_RANK") == "0":
        try:
            store = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
            socket.create_connection(store, SECONDS_TO_CONNECT).close()
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError, OverflowError):  # whatever is wrong there is told by those that need it
            pass
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]
    except OSError:
        parent = b""
    return parent == b"systemd" or (os.getppid() == 1 and b"python" not in parent)  # in a container, torchrun may be 1


def _leave(code: int, why: str) -> None:
    with suppress(OSError):
        os.write(2, f"trainer: error: {why}\n".encode())
    os._exit(code)


class Watched:
    """A command in a session of its own: so all that it starts can be ended together, whatever state it is in.

    The kernel ends it when this process ends (on Linux), however that ends. ``streams`` are as Popen takes them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **streams: Any) -> None:
        bound = partial(end_with_parent, os.getpid())
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True, preexec_fn=bound, **streams
        )
        self._gone = False

    def kill(self) -> None:
        """End all its processes, and wait until they are gone."""
        if self._gone:  # its number may be another group's by now
            return
        until = time.monotonic() + SECONDS_TO_VANISH
        with suppress(ProcessLookupError, PermissionError):  # the latter of what is left of ended ones, on macOS
            while time.monotonic() < until:  # where nobody waits for orphans, what is left of them stays
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.poll()
                time.sleep(0.01)
        self.process.wait()
        self._gone = True


def become_helper() -> None:
    """What a process that was forked from a rank does first: signals to the rank are not for it, and it ends with it.

    Ctrl-C, a terminal that is closed, and torchrun's own end reach every process of the rank's group. A helper that
    died of that would take from the rank what it needs to finish its step, so it leaves the group; the kernel ends it
    when the rank ends.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):  # a rank's own handlers; torch has set that of SIGTERM
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform == "linux":
        from multiprocessing import parent_process  # not before a rank is bound to its launcher

        os.setpgrp()
        rank = parent_process()
        end_with_parent(None if rank is None else rank.pid)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """What tells this start of this machine from any other; empty where the system does not say."""
    return BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""


@dataclass(frozen=True)
class ProcessId:
    """A process, told from a later one with the same number."""

    host: str
    pid: int
    boot_id: str  # of the machine's kernel
    namespace: str  # in which the number holds; containers have their own
    began: int  # in the kernel's ticks since boot

    @classmethod
    def own(cls) -> ProcessId:
        """This process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """A process that this one can see."""
        found = _stat(pid)
        return cls(socket.gethostname(), pid, boot_id(), _namespace(), found[1] if found else 0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> ProcessId:
        """What :meth:`to_dict` gave; a ValueError for what came from elsewhere and cannot be that."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("no process")
        pid, began, texts = values["pid"], values["began"], [values[name] for name in ("host", "boot_id", "namespace")]
        if not (type(pid) is type(began) is int and 0 < pid <= MOST_PIDS and began >= 0):
            raise ValueError("no number of a process")
        if not all(isinstance(text, str) and len(text) <= LONGEST_NAME for text in texts):
            raise ValueError("no name of a machine")
        return cls(**values | {"host": escaped(values["host"])})

    def is_here(self) -> bool:
        """Whether this process can see it: it is of the same machine and container, and Linux tells."""
        return bool(self.boot_id and self.namespace) and (self.boot_id, self.namespace) == (boot_id(), _namespace())

    def state(self) -> str:
        """``running``, ``stopped`` by a signal, or ``gone``; only for one that is here."""
        found = _stat(self.pid)
        if found is None or found[1] != self.began or found[0] in GONE:
            return "gone"
        return "stopped" if found[0] == STOPPED else "running"

    def is_kin(self) -> bool:
        """Whether one process has started this and that, or one of the two the other: as it is with ranks."""
        found, own = _stat(self.pid), _stat(os.getpid())
        if not self.is_here() or found is None or found[1] != self.began or own is None:
            return False
        return own[2] in (found[2], self.pid) or found[2] == os.getpid()

    def kill(self) -> None:
        """End it at once, if it is here, still the same, and kin: whatever else names it may have been made up."""
        if self.is_here() and self.state() != "gone" and self.is_kin():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def _is_gone(pid: int) -> bool:
    found = _stat(pid)
    return found is None or found[0] in GONE


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, start and parent of a process; ``None`` when there is none of that number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return fields[0], int(fields[19]), int(fields[1])


@lru_cache(maxsize=1)
def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
