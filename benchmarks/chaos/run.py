"""A run of the recipe, as torchrun would start it: its ranks forked, watched, disturbed and waited for."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..common import torchrun_variables
from .forks import SECONDS_BETWEEN_LOOKS, fork, living_children

RECIPE = Path(__file__).with_name("recipe.py")
PATIENCE = 60.0
"""Seconds after which what has not ended, or not come to a step, is given up: four times what is promised."""

TORCHRUN_LOOKS = 0.1
"""Seconds between the looks of torchrun at its ranks."""

FIRST_PORT, PORTS = 12000, 18000
"""Below those that the kernel gives to connections, so that none is taken between choosing and listening."""


@dataclass(frozen=True)
class Shape:
    """How a run is cut up.

    Args:
        strategy: single, ddp or fsdp.
        ranks: how many.
    """

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy} × {self.ranks}"


class ForkedRun:
    """The ranks of one start of a run.

    Args:
        folder: ``run`` in it is the run directory; what is printed and logged lies beside that.
        shape: strategy and ranks.
        flags: of ``trainer fit``.
        environment: of all ranks.
        launched: whether there is a launcher that does what that of ``torchrun --standalone`` does: it hosts the ranks'
            store and, when one rank has failed, asks the others to stop. Without it rank 0 hosts the store.
        plots: whether it draws the plots that a run ends with, which take half of the time of one as short as this.
        recipe: what is run.
        port: a port to begin to look for a free one at; another one for every run that goes on at the same time.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        launched: bool = True,
        plots: bool = False,
        port: int = 0,
        run_dir: Path | None = None,
        recipe: Path = RECIPE,
    ) -> None:
        self.folder, self.shape = folder, shape
        folder.mkdir(parents=True, exist_ok=True)
        self.start = len(list(folder.glob("samples-*-0.txt")))
        self.run_dir = run_dir or folder / "run"
        arguments = ["fit", str(recipe), "--run.dir", str(self.run_dir), "--memory.strategy", shape.strategy, *flags]
        port = _free_port(port)
        self.store = fork(partial(_host, port), folder / "store.txt") if launched else None
        shared = {
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": str(launched),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        self.asked = False
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        for rank in range(shape.ranks):
            own = torchrun_variables(rank, shape.ranks, port) | shared
            samples = self.samples(rank)
            samples.touch()
            self.pids[rank] = fork(partial(_be_rank, arguments, own, samples, plots), self.output(rank))

    def output(self, rank: int) -> Path:
        """What a rank prints."""
        return self.folder / f"output-{self.start}-{rank}.txt"

    def samples(self, rank: int) -> Path:
        """The samples of each window that a rank has begun, a line a window."""
        return self.folder / f"samples-{self.start}-{rank}.txt"

    def windows(self, rank: int) -> list[str]:
        """The lines of that file."""
        return self.samples(rank).read_text().splitlines()

    def errors(self) -> list[str]:
        """The first error line of each rank that has one."""
        lines = [[line for line in self.text(rank).splitlines() if "trainer: error: " in line] for rank in self.pids]
        return [found[0] for found in lines if found]

    def text(self, rank: int) -> str:
        """All that a rank has printed."""
        return self.output(rank).read_text(errors="replace")

    def send(self, ranks: Iterable[int], number: int) -> None:
        """A signal to those of ``ranks`` that have not ended."""
        for rank in ranks:
            if rank not in self.codes:
                os.kill(self.pids[rank], number)

    def wait_for_step(self, step: int, rank: int = 0) -> bool:
        """Wait until ``rank`` has begun step ``step``, from 1; ``False`` when a rank ends before, or patience does."""
        until = time.monotonic() + PATIENCE
        while len(self.windows(rank)) < step:
            self._look()
            if self.codes or time.monotonic() > until:
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return True

    def finished(self) -> bool:
        """Whether all ranks have ended, and well."""
        self._look()
        if self.codes.keys() != self.pids.keys() or any(self.codes.values()):
            return False
        self._end_store()
        return True

    def wait(self) -> bool:
        """Wait for the end of all ranks; ``False`` when patience ends first: they are killed then."""
        until = time.monotonic() + PATIENCE
        while self.codes.keys() != self.pids.keys():
            self._look()
            if time.monotonic() > until:
                self.end()
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._end_store()
        return True

    def end(self) -> None:
        """Kill what has not ended."""
        self.send(self.pids, signal.SIGKILL)
        while self.codes.keys() != self.pids.keys():
            self._look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._end_store()

    def orphans(self) -> int:
        """Processes that the ranks have left behind, two seconds after their end; they are killed."""
        left = living_children(2.0)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        living_children(2.0)
        return len(left)

    def _look(self) -> None:
        now = time.monotonic()
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self.codes[rank], self.ended[rank] = os.waitstatus_to_exitcode(status), now
        failed = [self.ended[rank] for rank, code in self.codes.items() if code]
        if self.store is not None and failed and not self.asked and now > min(failed) + TORCHRUN_LOOKS:
            self.asked = True
            self.send(self.pids, signal.SIGTERM)

    def _end_store(self) -> None:
        if self.store is not None:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
            self.store = None


def _be_rank(arguments: list[str], environment: Mapping[str, str], samples: Path, plots: bool) -> int:
    import torch

    from trainer.cli import entry
    from trainer.run import directory as rundir

    from . import failpoints

    os.environ.update(environment)
    tempfile.tempdir = None  # that of TMPDIR
    torch.set_num_threads(1)  # OpenMP's threads did not survive the fork
    log_windows(samples)
    failpoints.install()
    if not plots:
        rundir.plot_curves = rundir.plot_memory = lambda *args: None  # type: ignore[assignment]
    sys.argv = ["trainer", *arguments]
    try:
        entry()
    except SystemExit as end:
        return int(end.code or 0)
    raise AssertionError("entry() exits")


def log_windows(path: Path) -> None:
    """Have every step write down its samples before it is taken, at once: no buffer is lost when it is killed."""
    from trainer.engine.step import Stepper
    from trainer.engine.window import Window

    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    launch = Stepper.launch

    def logged(self: Stepper, window: Window, *then: object) -> None:
        line = " ".join("-" if micro.is_empty else ",".join(map(str, micro.indices)) for micro in window)
        os.write(descriptor, f"{line}\n".encode())
        launch(self, window, *then)  # type: ignore[arg-type]

    Stepper.launch = logged  # type: ignore[method-assign]


def _host(port: int) -> int:
    from trainer.launching.local_store import loopback_store

    store = loopback_store(port)
    while store:
        time.sleep(3600)
    return 0


def _free_port(first: int) -> int:
    for number in range(PORTS):
        port = FIRST_PORT + (first + number) % PORTS
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")
