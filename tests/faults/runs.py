"""Runs that are disturbed: real processes under every launcher, with a tiny recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from helpers.started import StartedRun

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
    elif what == "exit":
        raise SystemExit(0)
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

LAUNCHERS = ("plain", "torchrun", "torchrun.sh")
SCRIPT = Path(__file__).parents[2] / "launch" / "torchrun.sh"
BIN = Path(sys.executable).parent
LONGEST = 30.0
"""Seconds that the end of a disturbed run may take; fifteen are promised, on a machine with nothing else to do."""


class DisturbedRun(StartedRun):
    """A run of the recipe above.

    Args:
        folder: for the recipe, the run and what it prints.
        launcher: one of LAUNCHERS.
        ranks: how many.
        flags: of ``trainer fit``.
    """

    def __init__(self, folder: Path, launcher: str, ranks: int, *flags: str) -> None:
        recipe = folder / "own.py"
        recipe.write_text(RECIPE)
        fit = ["-m", "trainer", "fit", str(recipe), "--run.dir", str(folder / "run"), *flags]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        several = ["--run.devices", str(ranks)] if ranks > 1 else []
        commands = {
            "plain": [sys.executable, *fit, *several],
            "torchrun": [sys.executable, *torchrun, *fit],
            "torchrun.sh": ["env", f"PATH={BIN}{os.pathsep}{os.environ['PATH']}", str(SCRIPT), str(ranks), *fit[3:]],
        }
        super().__init__(folder, commands[launcher], warm=launcher == "plain")

    def errors(self) -> list[str]:
        """The lines of its errors, in order."""
        return [line for line in self.text.splitlines() if "trainer: error: " in line]

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Until it prints ``text``."""
        ended = self.until(lambda: text in self.text or self.process.poll() is not None, seconds)
        assert text in self.text, f"{text!r} is not in, {'at its end' if ended else 'in time'}:\n{self.text}"
