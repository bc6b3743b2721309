"""Jobs of ``launch/slurm.sbatch``, the settings that they train with, and what they leave."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from helpers import LONG

SETTINGS = """
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1, at=10, cut=10),
    optim=Optim("sgd", lr=0.1, momentum=0.9, clip_norm=1.0),
    batch_size=50,
    max_steps=40,
    memory=Memory(micro_batch_size=5, precision="64-true"),
    checkpoint=Checkpoint(every=100),
    run=Run(accelerator="cpu", predict=False, evaluate=False),
"""


@dataclass
class Job:
    """A job of ``launch/slurm.sbatch``, and what it leaves."""

    cluster: Cluster
    number: str
    output: Path
    marks: Path  # a folder with a file of each rank that has reached its tenth step: its pid

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    def wait_for_step(self) -> list[int]:
        """Until both ranks are in their tenth step; their pids."""
        files = [self.marks / rank for rank in ("0", "1")]
        self._wait(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def wait_for_restart(self) -> None:
        """Until it is in the queue again, and has left its nodes; it need not wait two minutes there, as is usual."""
        self._wait(lambda: self.cluster.restarts(self.number) == 1)
        self._wait(self.cluster.idle)
        time.sleep(2)  # a node takes a job that begins in the second in which it was ended for the ended one
        self.cluster.command("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def wait(self) -> str:
        """Until it has ended, and in which state."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "PREEMPTED", "REQUEUED")
        self._wait(lambda: self.cluster.state(self.number) not in running)
        return self.cluster.state(self.number)

    def _wait(self, condition) -> None:
        until = time.monotonic() + LONG
        while not condition():
            state = self.cluster.state(self.number)
            logs = {path.name: path.read_text()[-2000:] for path in self.marks.parent.rglob("*.log")}
            assert time.monotonic() < until, f"{state}, {self.cluster.command('squeue')}\n{self.text}\n{logs}"
            assert state != "FAILED" or condition(), f"{self.text}\n{logs}"
            time.sleep(0.2)
