"""Runs that are disturbed, and that a test cannot leave behind: real processes under every launcher."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("reads /proc", allow_module_level=True)

from helpers.started import StartedRun, listening_addresses, own_recipe

SCRIPT = Path(__file__).parents[2] / "launch" / "torchrun.sh"
BIN = Path(sys.executable).parent
STEPS_ARE_TAKEN = "step 1/2000"
LOOPBACK = "0100007F"


class DisturbedRun(StartedRun):
    """A run of ``helpers/own.py``.

    Args:
        folder: for the recipe, the run and what it prints.
        launcher: plain, torchrun, torchrun.sh, or forks: ranks that import nothing, and know each other as torchrun's.
        ranks: how many.
        flags: of ``trainer fit``.
    """

    def __init__(self, folder: Path, launcher: str, ranks: int, *flags: str) -> None:
        fit = ["-m", "trainer", "fit", str(own_recipe(folder)), "--run.dir", str(folder / "run"), *flags]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        several = ["--run.devices", str(ranks)] if ranks > 1 else []
        commands = {
            "forks": [sys.executable, *fit],
            "plain": [sys.executable, *fit, *several],
            "torchrun": [sys.executable, *torchrun, *fit],
            "torchrun.sh": ["env", f"PATH={BIN}{os.pathsep}{os.environ['PATH']}", str(SCRIPT), str(ranks), *fit[3:]],
        }
        forks = ranks if launcher == "forks" else 1
        super().__init__(folder, commands[launcher], launcher in ("forks", "plain"), forks)

    def errors(self) -> list[str]:
        """The lines of its errors, in order."""
        return [line for line in self.text.splitlines() if "trainer: error: " in line]

    def assert_on_loopback(self) -> None:
        """Every socket of it listens there: the store's, and gloo's of each rank."""
        found = listening_addresses(self.pids())
        assert len(found) >= 3
        assert {address.split(":")[0] for address in found} == {LOOPBACK}

    def wait_for(self, text: str = STEPS_ARE_TAKEN, seconds: float = 60.0) -> None:
        """Until it prints ``text``."""
        ended = self.until(lambda: text in self.text or self.process.poll() is not None, seconds)
        assert text in self.text, f"{text!r} is not in, {'at its end' if ended else 'in time'}:\n{self.text}"


@pytest.fixture
def start(tmp_path):
    """A function that starts a :class:`DisturbedRun`."""
    started = []

    def begin(launcher, ranks, *flags):
        started.append(DisturbedRun(tmp_path, launcher, ranks, *flags))
        return started[-1]

    yield begin
    for run in started:
        run.end()
