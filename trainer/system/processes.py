"""Process identity and lifetime: identify a process, check whether it runs, and end it with its parent."""

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

PR_SET_PDEATHSIG = 1  # see prctl(2)

SUPERVISOR = "TRAINER_SUPERVISOR"
"""Environment variable with the identity of the ``trainer run`` process that started the ranks."""
LAUNCHER = "TRAINER_LAUNCHER"
"""Environment variable with the PID of the process that started the ranks."""
BOUND = "TRAINER_RANK_BOUND"
"""Environment variable that a rank sets: its children inherit torchrun's variables but are not ranks."""

MAIN = Path(__file__).parents[1] / "__main__.py"
THIS_PACKAGE = f"""\
import sys
sys.path[:1] = [{str(MAIN.parent.parent)!r}, *(path for path in sys.path[:1] if path)]
import trainer
del sys.path[0]
"""
"""Code for ``python -c`` that imports this package without the working directory, which Python puts first."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STOPPED, GONE = "T", "ZX"
"""States in /proc/PID/stat: stopped by a signal; ended (also a zombie)."""

CONNECT_TIMEOUT = 5.0
EXIT_TIMEOUT = 5.0
MAX_PID = 2**22  # the maximum on Linux
MAX_NAME_BYTES = 255

_told: list[int] = []


def trainer_command(*words: str) -> list[str]:
    """Return the command that runs ``trainer`` with these arguments in a new process.

    ``python -m trainer`` could import, for example, a random.py in the working directory. Only Python 3.11 has a flag.
    """
    return [sys.executable, str(MAIN), *words]


def python_command(code: str) -> list[str]:
    """Return the command that runs Python code in a new process that can import this package."""
    return [sys.executable, "-c", THIS_PACKAGE + code]


def end_with_parent(starter: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux); exit now if ``starter`` has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if starter is not None and _is_gone(starter):
            os._exit(1)


def end_with_launcher() -> None:
    """Make a rank end with its launcher. Called before slow imports.

    Ranks whose launcher is killed while they import would otherwise wait for each other forever. Our launchers pass
    their PID in :data:`LAUNCHER`. torchrun does not, and it may have ended before this call; then its store is gone, or
    this process has been adopted by init. srun and Ray end their own processes.
    """
    launcher = os.environ.pop(LAUNCHER, None)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and BOUND not in os.environ
    if sys.platform != "linux" or (launcher is None and not by_torchrun):
        return
    os.environ[BOUND] = "1"
    if launcher is not None and not (launcher.isascii() and launcher.isdigit()):
        _leave(2, f"{LAUNCHER}={launcher!r} is not a process ID: unset it")
    _told.extend([] if launcher is None else [int(launcher)])
    end_with_parent()
    if _is_gone(int(launcher)) if launcher is not None else _is_orphan():
        _leave(1, "the process that started this rank has ended")


def launcher_knows_pid() -> bool:
    """Return whether one of our launchers started this rank; it ends all ranks when one of them ends."""
    return bool(_told)


def _is_orphan() -> bool:
    """Return whether the torchrun that started this process has ended."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_RANK") == "0":
        try:
            store = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
            socket.create_connection(store, CONNECT_TIMEOUT).close()
        except ConnectionRefusedError:
            return True
        except (OSError, ValueError, OverflowError):  # the code that uses the address reports the error
            pass
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]
    except OSError:
        parent = b""
    return parent == b"systemd" or (os.getppid() == 1 and b"python" not in parent)  # torchrun may be PID 1


def _leave(code: int, message: str) -> None:
    with suppress(OSError):
        os.write(2, f"trainer: error: {message}\n".encode())
    os._exit(code)


class ProcessSession:
    """A command in a new session, which can be killed as a whole. On Linux, it is killed when this process ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **streams: Any) -> None:
        bound = partial(end_with_parent, os.getpid())
        how: dict[str, Any] = {"start_new_session": True, "preexec_fn": bound, **streams}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, **how)
        self._gone = False

    def kill(self) -> None:
        """Kill all its processes and wait until they are gone."""
        if self._gone:  # the PID may belong to another process group now
            return
        until = time.monotonic() + EXIT_TIMEOUT
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: only zombies are left, on macOS
            while time.monotonic() < until:  # in a container without init, zombies stay
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.poll()
                time.sleep(0.01)
        self.process.wait()
        self._gone = True


def detach_from_rank() -> None:
    """Prepare a process that was forked from a rank: it ignores signals for the rank and ends with the rank.

    Ctrl-C, a closed terminal and the end of torchrun signal the whole process group of the rank. The rank needs its
    helpers to finish its step, so a helper leaves the group; the kernel kills it when the rank ends.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):  # remove the rank's handlers; torch has reset that of SIGTERM
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform == "linux":
        from multiprocessing import parent_process  # slow, so not before end_with_launcher()

        os.setpgrp()
        rank = parent_process()
        end_with_parent(None if rank is None else rank.pid)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the ID of the machine's current boot; empty if the system has none."""
    return BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""


@dataclass(frozen=True)
class ProcessId:
    """The identity of a process, which differs from that of a later process with the same PID."""

    host: str
    pid: int
    boot_id: str
    namespace: str  # PID namespace; containers have separate ones
    began: int  # start time in kernel ticks since boot

    @classmethod
    def current(cls) -> ProcessId:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a process that this one can see."""
        found = _stat(pid)
        return cls(socket.gethostname(), pid, boot_id(), _namespace(), found[1] if found else 0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> ProcessId:
        """Return the identity from the dict of :meth:`to_dict`; raise a ValueError for any other value."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("not a process identity")
        pid, began, texts = values["pid"], values["began"], [values[name] for name in ("host", "boot_id", "namespace")]
        if not (type(pid) is type(began) is int and 0 < pid <= MAX_PID and began >= 0):
            raise ValueError("not a process ID and start time")
        if not all(isinstance(text, str) and len(text) <= MAX_NAME_BYTES for text in texts):
            raise ValueError("not a host, boot ID and namespace")
        return cls(**values | {"host": escaped(values["host"])})

    def is_visible(self) -> bool:
        """Return whether it runs on this machine and in this container (Linux only)."""
        return bool(self.boot_id and self.namespace) and (self.boot_id, self.namespace) == (boot_id(), _namespace())

    def state(self) -> str:
        """Return ``running``, ``stopped`` (by a signal) or ``gone``; valid only if :meth:`is_visible`."""
        found = _stat(self.pid)
        if found is None or found[1] != self.began or found[0] in GONE:
            return "gone"
        return "stopped" if found[0] == STOPPED else "running"

    def is_related(self) -> bool:
        """Return whether it is the parent, a child or a sibling of this process, as ranks are."""
        found, own = _stat(self.pid), _stat(os.getpid())
        if not self.is_visible() or found is None or found[1] != self.began or own is None:
            return False
        return own[2] in (found[2], self.pid) or found[2] == os.getpid()

    def kill(self) -> None:
        """Kill it if it runs here and is related to this process; other identities in a file may be forged."""
        if self.is_visible() and self.state() != "gone" and self.is_related():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def _is_gone(pid: int) -> bool:
    found = _stat(pid)
    return found is None or found[0] in GONE


def _stat(pid: int) -> tuple[str, int, int] | None:
    """Return state, start time and parent of a process, or ``None`` if no process has this PID."""
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
