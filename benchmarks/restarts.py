"""Does a supervised run survive kill -9 at random instants, and what does a restart cost?"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from common import Record, table, workplace

RECIPE = Path(__file__).parent / "recipes" / "paced.py"
PAUSE = 0.05
AFTER_FIRST_STEP = 10.0
"""A kill comes at an instant between the start of an attempt and, after its first step, as long again as the start took
and this many seconds: about half of the kills come in training."""

BACKOFF = 0.2
"""Seconds before the first restart, twice as long after each crash without a newer checkpoint."""

HEADER = ("ranks", "kills", "recoveries", "losses identical", "median overhead", "range")
LONGEST = 180.0
"""Seconds after which an attempt that takes no step counts as lost."""


@dataclass
class Kill:
    """One of the kills.

    Args:
        when: seconds since the epoch.
        training: whether the attempt had taken a step.
        overhead: seconds from the kill to the end of the first new step; ``None`` where another kill came before that.
    """

    when: float
    training: bool
    overhead: float | None = None


@dataclass
class Trial:
    """A supervised run that is killed again and again.

    Args:
        folder: for its files.
        ranks: how many.
        seed: of the instants and of which process is killed.
    """

    folder: Path
    ranks: int
    seed: int
    kills: list[Kill] = field(default_factory=list)
    startups: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.run_dir, self.log = self.folder / "run", self.folder / "steps"
        own = ["--restarts", "1000", "--patience", "1000", "--backoff", str(BACKOFF), "--nproc", str(self.ranks)]
        flags = ["--run.dir", str(self.run_dir), "--model.log", str(self.log), "--model.pause", str(PAUSE)]
        command = [sys.executable, "-m", "trainer", "run", *own, "--", str(RECIPE), *flags]
        with open(self.folder / "output", "wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def attempts(self) -> list[dict[str, Any]]:
        """What the supervisor has written of them."""
        with suppress(OSError):
            return json.loads((self.run_dir / "supervisor.json").read_text())["attempts"]
        return []

    def _running(self, count: int) -> dict[str, Any] | None:
        """The newest attempt, if it runs and comes after ``count`` others."""
        attempts = self.attempts()
        return attempts[-1] if len(attempts) > count and attempts[-1]["end"] is None else None

    def first_step(self, since: float) -> float | None:
        """When the first step after ``since`` had ended: a process that begins a second one has taken one."""
        seen = set()
        for line in self.log.read_text().splitlines() if self.log.exists() else ():
            pid, when = line.split()
            if float(when) > since and pid in seen:
                return float(when)
            if float(when) > since:
                seen.add(pid)
        return None

    def kill_once(self) -> None:
        """Wait for an instant of the newest attempt, and kill one of its processes."""
        count = len(self.kills)
        newest = self._wait(lambda: self._running(count))
        began = _seconds(newest["start"])
        if not self.startups:  # the first attempt shows how long that takes on this machine
            self._wait(lambda: self.first_step(began))
        else:
            longest = 2 * statistics.median(self.startups) + AFTER_FIRST_STEP
            time.sleep(max(0.0, began + self.random.uniform(0.0, longest) - time.time()))
        pids = self._wait(self._ranks)
        step = self.first_step(began)
        if step is not None:
            self.startups.append(step - began)
        os.kill(self.random.choice(pids), signal.SIGKILL)
        self.kills.append(Kill(time.time(), step is not None))

    def measure(self) -> None:
        """Fill in how long it took after each kill until there was a new step."""
        ends = [kill.when for kill in self.kills[1:]] + [float("inf")]
        for kill, until in zip(self.kills, ends, strict=True):
            step = self.first_step(kill.when)
            kill.overhead = step - kill.when if step is not None and step < until else None

    def finish(self) -> int:
        """Let the last attempt take steps, ask the run to stop, and return the supervisor's exit code."""
        last = self.kills[-1].when
        self._wait(lambda: self.first_step(last))
        self.process.terminate()
        return self.process.wait(LONGEST)

    def losses(self) -> list[tuple[str, str]]:
        """Of every step, as ``metrics.csv`` has them."""
        with open(self.run_dir / "metrics.csv", newline="") as file:
            return [(row["step"], row["loss"]) for row in csv.DictReader(file)]

    def reference(self, steps: int) -> list[tuple[str, str]]:
        """The losses of a run that nothing disturbs."""
        folder = self.folder / "reference"
        flags = ["--run.dir", str(folder), "--run.devices", str(self.ranks), "--max_steps", str(steps)]
        command = [sys.executable, "-m", "trainer", "fit", str(RECIPE), *flags, "--checkpoint.every", "null"]
        subprocess.run(command, check=True, capture_output=True)
        with open(folder / "metrics.csv", newline="") as file:
            return [(row["step"], row["loss"]) for row in csv.DictReader(file)]

    def _ranks(self) -> list[int]:
        """The processes of the newest attempt that are there."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = entry.name.isdigit() and (entry / "cmdline").read_bytes().split(b"\0")
                if words and b"fit" in words and str(self.run_dir).encode() in words:
                    found.append(int(entry.name))
        return sorted(found)

    def _wait(self, look: Any) -> Any:
        until = time.monotonic() + LONGEST
        while not (found := look()):
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"the run is lost:\n{(self.folder / 'output').read_text()[-3000:]}")
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """End what is left of it."""
        self.process.kill()
        self.process.wait()


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def measure(folder: Path, ranks: int, kills: int, seed: int, minutes: float) -> dict[str, Any]:
    """Kill a run of ``ranks`` so many times, or for so long, and say what became of it."""
    folder.mkdir()
    trial = Trial(folder, ranks, seed)
    until = time.monotonic() + 60 * minutes
    try:
        while len(trial.kills) < kills and time.monotonic() < until:
            trial.kill_once()
        code = trial.finish()
    finally:
        trial.close()
    trial.measure()
    losses = trial.losses()
    overheads = sorted(kill.overhead for kill in trial.kills if kill.overhead is not None)
    started = len(trial.attempts()) - 1
    return {
        "ranks": ranks,
        "kills": len(trial.kills),
        "in_training": sum(kill.training for kill in trial.kills),
        "recoveries": min(started, len(trial.kills)),
        "other_crashes": started - len(trial.kills),
        "exit_code_when_asked_to_stop": code,
        "steps": len(losses),
        "losses_are_those_of_an_undisturbed_run": losses == trial.reference(len(losses)),
        "overhead_s": {
            "measured": len(overheads),
            "median": round(statistics.median(overheads), 2),
            "least": round(overheads[0], 2),
            "most": round(overheads[-1], 2),
        },
    }


def main() -> None:
    """Run the trials and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="of each run (default: 100)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="runs, by their ranks (default: 1 2)")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which a run is killed no more (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    record = Record("restarts", vars(wanted))
    runs: list[dict[str, Any]] = []
    with workplace(None) as folder:
        for ranks in wanted.ranks:
            runs.append(measure(folder / str(ranks), ranks, wanted.kills, wanted.seed + ranks, wanted.minutes))
            record.write(runs=runs)
    record.write(complete=True)
    print(
        table(["ranks", "kills", "recoveries", "losses identical", "median overhead", "range"], [_row(r) for r in runs])
    )


def _row(run: dict[str, Any]) -> list[str]:
    seconds = run["overhead_s"]
    same = "yes" if run["losses_are_those_of_an_undisturbed_run"] else "NO"
    kills = f"{run['kills']} ({run['in_training']} in training)"
    span = f"{seconds['least']} to {seconds['most']} s"
    return [str(run["ranks"]), kills, str(run["recoveries"]), same, f"{seconds['median']} s", span]


if __name__ == "__main__":
    main()
