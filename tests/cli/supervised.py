"""Supervised runs: real processes, with a tiny recipe that comes to grief in a way of its choice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
from helpers.started import StartedRun
from helpers.warm import WarmProcess

from trainer.supervise.attempt import newest_step

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


class ForkedProcess(WarmProcess):
    """In the place of ``Popen`` with ``python WORDS``: a fork of a process that has imported everything."""

    def __init__(self, command, *, env, stdout=None, stderr=None, pass_fds=(), **_):
        self.stderr = None
        stderr = stdout if stderr == subprocess.STDOUT else stderr
        if stderr == subprocess.PIPE:
            path = Path(mkdtemp(), "stderr")
            os.mkfifo(path)
            self.stderr = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
        else:
            path = Path(os.readlink(f"/proc/self/fd/{stderr.fileno()}"))
        super().__init__(command[1:], path if stdout is stderr else Path(os.devnull), path, env=env, files=pass_fds)

    @property
    def returncode(self):
        return self.poll()


def fork_processes(patch: pytest.MonkeyPatch) -> None:
    """What is watched need not import torch; who started whom is another's to show."""
    named = SimpleNamespace(Popen=ForkedProcess, DEVNULL=subprocess.DEVNULL)
    patch.setattr("trainer.system.processes.subprocess", named)


class Supervised(StartedRun):
    """A ``trainer run`` with everything that it starts; ``own`` are its flags, ``flags`` the recipe's."""

    def __init__(self, folder: Path, *flags: str, own: tuple[str, ...] = ()) -> None:
        self.run_dir = folder / "run"
        recipe = folder / "frail.py"
        recipe.write_text(RECIPE)
        words = ["run", "--backoff", "0.2", *own, "--", str(recipe), "--run.dir", str(self.run_dir), *flags]
        super().__init__(folder, [sys.executable, "-m", "trainer", *words])

    @property
    def journal(self) -> dict:
        return json.loads((self.run_dir / "supervisor.json").read_text())

    @property
    def codes(self) -> list:
        return [attempt["exit_code"] for attempt in self.journal["attempts"]]

    def wait(self, seconds: float = 60.0) -> int:
        return super().wait(seconds)

    def wait_for_step(self, step: int, seconds: float = 60.0) -> None:
        """Until there is a checkpoint of ``step`` or a later one."""
        self.until(lambda: newest_step(self.run_dir) >= step or self.process.poll() is not None, seconds)
        assert newest_step(self.run_dir) >= step, f"no checkpoint of step {step} in:\n{self.text}"
