"""Supervised runs: real processes, with a tiny recipe that comes to grief in a way of its choice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.supervise.journal import newest_step

RECIPE = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

import torch
from trainer import Checkpoint, Memory, Optim, Recipe, Run, main
from trainer.data import Digits
from trainer.models import VisionTransformer

HERE = Path(__file__).parent


@dataclass
class Frail(VisionTransformer):
    "A Vision Transformer that does `what` on `rank` at its `at`-th micro-batch, `times` times in all."
    what: str = "nothing"
    rank: int = 0
    at: int = 14
    times: int = 1
    most: int = 1000
    micro_batches: int = 0

    def losses(self, module, batch):
        self.micro_batches += module.training
        here = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) == self.rank
        if module.training and len(batch["labels"]) > self.most:
            raise torch.OutOfMemoryError("out of memory, says the test")
        if here and module.training and self.micro_batches == self.at and self.is_due():
            disturb(self.what)
        if self.what == "slow":
            time.sleep(0.05)
        yield from super().losses(module, batch)

    def is_due(self):
        done = len(list(HERE.glob("done-*")))
        if self.what != "nothing" and done < self.times:
            (HERE / f"done-{done}").touch()
            return True
        return False


def disturb(what):
    if what == "raise":
        1 / 0
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


recipe = Recipe(
    model=Frail("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32),
    data=Digits(),
    optim=Optim("sgd", lr=0.1),
    batch_size=24,
    max_steps=20,
    epochs=1000,
    memory=Memory(micro_batch_size=12),
    checkpoint=Checkpoint(every=5, asynchronous=False),  # what a crash finds is always the same
    run=Run(evaluate=False, predict=False),
)

if __name__ == "__main__":
    main(recipe)
"""

FOREIGN = ("LT_", "TORCHELASTIC", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "NODE_RANK")


class Supervised:
    """A ``trainer run`` in its own session, with everything that it starts.

    Args:
        folder: for the recipe, the run and what it prints.
        own: flags of ``trainer run``.
        flags: of the recipe.
    """

    def __init__(self, folder: Path, *flags: str, own: tuple[str, ...] = ()) -> None:
        self.run_dir = folder / "run"
        recipe = folder / "frail.py"
        recipe.write_text(RECIPE)
        words = ["run", "--backoff", "0.2", *own, "--", str(recipe), "--run.dir", str(self.run_dir), *flags]
        self.mark = f"supervised-{folder.name}-{os.getpid()}"  # in the environment of every process of the run
        clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        clean |= {"OMP_NUM_THREADS": "1", "TRAINER_TEST_MARK": self.mark}
        self.output = folder / "output"
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer", *words], stdout=file, stderr=file, env=clean, start_new_session=True
            )

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    @property
    def journal(self) -> dict:
        """What ``supervisor.json`` holds."""
        return json.loads((self.run_dir / "supervisor.json").read_text())

    @property
    def codes(self) -> list:
        """The exit codes of the attempts."""
        return [attempt["exit_code"] for attempt in self.journal["attempts"]]

    def wait(self, seconds: float = 150.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {seconds} s:\n{self.text}") from None

    def wait_for_step(self, step: int, seconds: float = 120.0) -> None:
        """Until there is a checkpoint of ``step`` or a later one."""
        until = time.monotonic() + seconds
        while newest_step(self.run_dir) < step:
            assert time.monotonic() < until, f"no checkpoint of step {step} in:\n{self.text}"
            assert self.process.poll() is None, f"ended before step {step}:\n{self.text}"
            time.sleep(0.05)

    def pids(self) -> list[int]:
        """Its processes that are alive."""
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._has(entry)]

    def _has(self, entry: Path) -> bool:
        try:
            return self.mark.encode() in (entry / "environ").read_bytes()
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
