"""One trial: a run that is disturbed, what comes of it, and whether it goes on as if nothing had been."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from .compare import Samples, differences
from .run import ForkedRun, Shape

STEPS = 18
EVERY = 3
"""Steps of the recipe, and between two of its checkpoints."""

LIMIT = 15.0
"""Seconds in which all ranks of a disturbed run are to end."""


@dataclass
class Outcome:
    """What came of a trial.

    Args:
        what: what was done, in words.
        codes: exit codes of the disturbed start, by rank.
        seconds: from the disturbance to the end of the last rank.
        ended_in_time: whether that is within the limit, with the exit code that is promised.
        named: whether the first line of an error names the cause; ``None`` where no process is left to name it.
        resumed_exactly: whether the run, resumed, came to what the undisturbed one came to, bit for bit.
        orphans: processes that were left behind.
        redone: steps that were begun again.
        deviations: all that is not as promised, in words.
        skipped: why the trial could not take place here.
    """

    what: str = ""
    codes: list[int] = field(default_factory=list)
    seconds: float | None = None
    ended_in_time: bool = True
    named: bool | None = None
    resumed_exactly: bool = False
    orphans: int = 0
    redone: int = 0
    deviations: list[str] = field(default_factory=list)
    skipped: str | None = None


class Trial:
    """What every trial does.

    Args:
        name: of the fault.
        number: of the trial, from 0: all its draws derive from the two.
        shape: of the run.
        reference: of the undisturbed run of that shape: its ``digest`` and its ``samples``.
        folder: for everything that is written.
        port: where to begin to look for a free one; twenty are its own.
    """

    def __init__(
        self, name: str, number: int, shape: Shape, reference: dict[str, Any], folder: Path, port: int
    ) -> None:
        self.number, self.shape, self.reference = number, shape, reference
        self.folder = folder / f"{name}-{number}"
        self.random = Random(f"{name} {number}")
        self.launched = shape.ranks == 1 or number % 2 == 0
        self.port = port
        self.samples = Samples(reference["samples"])
        self.outcome = Outcome()
        self.flags: list[str] = ["--checkpoint.asynchronous", "false"] if self.random.random() < 0.5 else []
        # The last step was begun, but not finished; while a checkpoint is written, the one before it still counts.
        self.most_redone = EVERY + 1 if self.flags else 2 * EVERY + 1
        self.starts = 0

    def start(self, *flags: str, **environment: str) -> ForkedRun:
        """Start the run, or resume it."""
        resume = ["--run.resume", "auto"] if self.starts else []
        self.starts += 1
        return ForkedRun(
            self.folder,
            self.shape,
            *self.flags,
            *flags,
            *resume,
            environment=environment,
            launched=self.launched,
            plots=self.number % 5 == 0,
            port=self.port,
        )

    def any_rank(self) -> int:
        """One of the ranks."""
        return self.random.randrange(self.shape.ranks)

    def ended(self, run: ForkedRun, since: float | None = None, limit: float = LIMIT, code: int | None = None) -> None:
        """Wait for the end of a disturbed start, and judge it.

        Args:
            since: when it was disturbed; by default when its first rank ended.
            limit: seconds in which all ranks are to end.
            code: what they are to end with; by default anything but 0.
        """
        outcome = self.outcome
        in_patience = run.wait()
        outcome.codes = [run.codes[rank] for rank in sorted(run.codes)]
        outcome.seconds = max(run.ended.values()) - (min(run.ended.values()) if since is None else since)
        as_promised = all(got == code if code is not None else got != 0 for got in outcome.codes)
        outcome.ended_in_time = in_patience and outcome.seconds <= limit and as_promised
        if not outcome.ended_in_time:
            outcome.deviations.append(f"exit codes {outcome.codes} after {outcome.seconds:.1f} s")
        self.closed(run)

    def closed(self, run: ForkedRun) -> None:
        """What every start has to leave: no process, and a piece of the right sequence of samples."""
        if left := run.orphans():
            self.outcome.orphans += left
            self.outcome.deviations.append(f"{left} processes left behind")
        self.samples.add(run)
        self.outcome.redone = self.samples.redone

    def names(self, run: ForkedRun, pattern: str) -> None:
        """Judge the first error line of the ranks: one of them must have ``pattern``."""
        found = run.errors()
        self.outcome.named = any(re.search(pattern, line) for line in found)
        if not self.outcome.named:
            self.outcome.deviations.append(f"not named: {found}")

    def finish(self) -> None:
        """Resume to the end, and compare with the undisturbed run."""
        run = self.start()
        in_patience = run.wait()
        self.closed(run)
        if not in_patience or any(run.codes.values()):
            texts = [run.text(rank)[-2000:] for rank in sorted(run.codes)]
            self.outcome.deviations.append(f"resuming ended with {run.codes}: {texts}")
            return
        self.compare()

    def compare(self) -> None:
        """A run that has finished with the undisturbed one."""
        found = self.samples.finish() + differences(self.folder / "run", self.reference["digest"])
        if self.samples.redone > self.most_redone:
            found.append(f"{self.samples.redone} steps were begun again")
        self.outcome.resumed_exactly = not found
        self.outcome.deviations += found

    def pause(self, longest: float) -> None:
        """Any time up to ``longest`` seconds."""
        time.sleep(self.random.uniform(0, longest))
