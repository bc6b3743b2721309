"""Runs that are disturbed: real processes under every launcher, with a tiny recipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RECIPE = """
import os, signal, time
from dataclasses import dataclass

import torch
from trainer import Memory, Optim, Recipe, Run, main
from trainer.errors import RunError
from trainer.data import Digits
from trainer.models import VisionTransformer


@dataclass
class Disturbed(VisionTransformer):
    "A Vision Transformer that does `what` on `rank` in its third step."
    what: str = "nothing"
    rank: int = 0
    micro_batches: int = 0

    def losses(self, module, batch):
        self.micro_batches += module.training
        here = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) == self.rank
        if here and module.training and self.micro_batches == 1 + 2 * 6 // int(os.environ.get('WORLD_SIZE', 1)):
            disturb(self.what)
        yield from super().losses(module, batch)


class Waits:
    "A split that hangs at its seventh micro-batch on every rank but the first."

    def __init__(self, split):
        self.split, self.fetched = split, 0

    def __getattr__(self, name):
        return getattr(self.split, name)

    def __len__(self):
        return len(self.split)

    def __getitem__(self, i):
        return self.split[i]

    def __getitems__(self, indices):
        self.fetched += 1
        if self.fetched == 7 and os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(1000)
        return self.split.__getitems__(indices)


@dataclass
class DisturbedDigits(Digits):
    waits: bool = False

    def prepare(self, tokenizer=None):
        super().prepare(tokenizer)
        if self.waits:
            self.train = Waits(self.train)


def disturb(what):
    if what == "raise":
        1 / 0
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "hang":
        time.sleep(1000)
    elif what == "no memory":
        raise torch.OutOfMemoryError("no memory for these activations")
    elif what == "run error":
        raise RunError("this rank has had enough")


recipe = Recipe(
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32),
    data=DisturbedDigits(),
    optim=Optim("sgd", lr=0.1),
    batch_size=24,
    max_steps=2000,
    epochs=1000,
    memory=Memory(micro_batch_size=4),
    run=Run(evaluate=False, predict=False),
)

if __name__ == "__main__":
    main(recipe)
"""

LAUNCHERS = ("plain", "torchrun")
LONGEST = 30.0
"""Seconds that the end of a disturbed run may take; fifteen are promised, on a machine with nothing else to do."""


class DisturbedRun:
    """A run in its own session, so that nothing of it can be missed.

    Args:
        folder: for the recipe, the run and what it prints.
        launcher: plain or torchrun.
        ranks: how many.
        flags: of ``trainer fit``.
    """

    def __init__(self, folder: Path, launcher: str, ranks: int, *flags: str) -> None:
        recipe = folder / "own.py"
        recipe.write_text(RECIPE)
        fit = ["-m", "trainer", "fit", str(recipe), "--run.dir", str(folder / "run"), *flags]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        several = ["--run.devices", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *(torchrun + fit if launcher == "torchrun" else fit + several)]
        foreign = ("LT_", "TORCHELASTIC", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "NODE_RANK")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self.mark = f"disturbed-{folder.name}-{os.getpid()}"  # in the environment of every process of the run
        clean |= {"OMP_NUM_THREADS": "1", "TRAINER_TEST_MARK": self.mark}
        self.output = folder / "output"
        with open(self.output, "wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=clean, start_new_session=True)

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text()

    def errors(self) -> list[str]:
        """The lines of its errors, in order."""
        return [line for line in self.text.splitlines() if "trainer: error: " in line]

    def wait_for(self, text: str, seconds: float = 120.0) -> None:
        """Until it prints ``text``."""
        until = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < until, f"{text!r} is not in:\n{self.text}"
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.text}"
            time.sleep(0.1)

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

    def assert_no_orphan(self) -> None:
        """All processes of the run end within seconds."""
        until = time.monotonic() + 10
        while self.pids():
            assert time.monotonic() < until, f"left behind: {self.pids()}\n{self.text}"
            time.sleep(0.2)

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
