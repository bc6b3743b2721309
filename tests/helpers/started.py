"""A run as a user starts it, in a session of its own, so that nothing of it can be missed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from helpers import LONG
from helpers.ranks import free_port, torchrun_variables
from helpers.warm import WarmProcess

OWN = Path(__file__).with_name("own.py")

FOREIGN = ("LT_", "TORCHELASTIC", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "NODE_RANK")

MOST_WINDOWS, LEAST_SHARE = 8, 0.05
"""How often as many seconds are waited again for a run that has used more of a core in them: what is hung uses less."""

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


class StartedRun:
    """A command and all processes that it starts; what it prints is in ``folder``.

    If it is ``warm``, it is Python, and its ranks are forks of a process that has imported everything, with what
    torchrun would tell them.
    """

    def __init__(self, folder: Path, command: Sequence[str], warm: bool = False, ranks: int = 1) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        self.mark = f"{type(self).__name__}-{folder.name}-{os.getpid()}"  # in the environment of every process of it
        clean |= {"OMP_NUM_THREADS": "1", "TRAINER_TEST_MARK": self.mark}
        self.output = folder / "output"
        self.processes: list[WarmProcess] | list[subprocess.Popen]
        if warm:
            port = free_port()
            told = [torchrun_variables(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{}]
            self.processes = [WarmProcess(command[1:], self.output, self.output, env=clean | one) for one in told]
        else:
            with open(self.output, "wb") as file:
                streams = {"stdout": file, "stderr": file}
                self.processes = [subprocess.Popen(command, env=clean, start_new_session=True, **streams)]
        self.process = self.processes[0]

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def wait(self, seconds: float = LONG) -> int:
        """Its exit code; see :meth:`until`."""
        assert self.until(lambda: self.process.poll() is not None, seconds), f"no end in {seconds} s:\n{self.text}"
        return self.process.wait()

    def until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Whether ``condition`` comes true within ``seconds``, or later while the run gets on: on a busy machine."""
        for _ in range(MOST_WINDOWS):
            pids, used = self._progress()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if condition():
                    return True
                time.sleep(0.05)
            others, more = self._progress()
            if pids == others and more - used < LEAST_SHARE * seconds:
                break
        return bool(condition())

    def _progress(self) -> tuple[list[int], float]:
        """Its processes, and the CPU seconds that they have used."""
        pids = self.pids()
        return pids, sum(map(_cpu_seconds, pids))

    def pids(self) -> list[int]:
        """Its processes that are alive."""
        return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and self._has(folder)]

    def _has(self, folder: Path) -> bool:
        try:
            session = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3])
            sessions = [process.pid for process in self.processes]  # a fork has no environ of its own
            return session in sessions or self.mark.encode() in (folder / "environ").read_bytes()
        except OSError:  # it has ended
            return False

    def assert_nothing_left(self, seconds: float = 60.0) -> None:
        """All its processes end within ``seconds``."""
        assert self.until(lambda: not self.pids(), seconds), f"left behind: {self.pids()}\n{self.text}"

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


def own_recipe(folder: Path, settings: str = "") -> Path:
    """``folder/own.py``: the recipe of ``helpers/own.py``, with other ``settings``."""
    path = folder / "own.py"
    changed = f"recipe = recipe.replace({settings})\n\nif __name__" if settings else "if __name__"
    path.write_text(OWN.read_text().replace("if __name__", changed))
    return path


def listening_addresses(pids: Sequence[int]) -> list[str]:
    """Addresses and ports, as /proc writes them, at which processes wait for connections."""
    sockets = {link for pid in pids for link in open_links(pid)}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return [fields[1] for fields in lines if fields[3] == LISTENING and f"socket:[{fields[9]}]" in sockets]


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_links(pid: int) -> list[str]:
    """What the open file descriptors of a process point to, without those that close meanwhile."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found.append(os.readlink(path))
    return found
