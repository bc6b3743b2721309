"""A run as a user starts it, in a session of its own, so that nothing of it can be missed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FOREIGN = ("LT_", "TORCHELASTIC", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "NODE_RANK")

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


class StartedRun:
    """A command and all processes that it starts.

    Args:
        folder: for what it prints.
        command: with its arguments.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        self.mark = f"{type(self).__name__}-{folder.name}-{os.getpid()}"  # in the environment of every process of it
        clean |= {"OMP_NUM_THREADS": "1", "TRAINER_TEST_MARK": self.mark}
        self.output = folder / "output"
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=clean, start_new_session=True)

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def wait(self, seconds: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {seconds} s:\n{self.text}") from None

    def pids(self) -> list[int]:
        """Its processes that are alive."""
        return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and self._has(folder)]

    def _has(self, folder: Path) -> bool:
        try:
            return self.mark.encode() in (folder / "environ").read_bytes()
        except OSError:  # it has ended
            return False

    def assert_nothing_left(self, seconds: float = 10.0) -> None:
        """All its processes end within ``seconds``."""
        until = time.monotonic() + seconds
        while self.pids():
            assert time.monotonic() < until, f"left behind: {self.pids()}\n{self.text}"
            time.sleep(0.1)

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def listening_addresses(pids: Sequence[int]) -> list[str]:
    """Addresses and ports, as /proc writes them, at which processes wait for connections."""
    sockets = {link for pid in pids for link in _links(Path(f"/proc/{pid}/fd"))}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return [fields[1] for fields in lines if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets]


def _links(folder: Path) -> list[str]:
    found = []
    for path in folder.iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(path))
    return found
