"""Supervised runs: real processes, with the tiny recipe of ``helpers/own.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
from helpers.started import StartedRun, own_recipe
from helpers.warm import WarmProcess

from trainer.supervise.attempt import newest_step

SETTINGS = """
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, at=7, cut=2),
    max_steps=20,
    memory=Memory(micro_batch_size=12),
    checkpoint=Checkpoint(every=5, asynchronous=False),  # what a crash finds is always the same
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
        recipe = str(own_recipe(folder, SETTINGS))
        words = ["run", "--backoff", "0.2", *own, "--", recipe, "--run.dir", str(self.run_dir), *flags]
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
