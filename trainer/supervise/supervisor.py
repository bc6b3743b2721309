"""A run that is started again when it dies, until it has finished, is asked to stop, or cannot get further."""

from __future__ import annotations

import shlex
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainer.errors import EXIT_REQUEUE
from trainer.faults.signals import is_hangup, stop_signals
from trainer.supervise.attempt import (
    SECONDS_BETWEEN_LOOKS,
    Attempt,
    Ending,
    FitCommand,
    Journal,
    attempts,
    kernel_kills,
    known_cut,
    newest_step,
    ran_out_of_memory,
    say,
)
from trainer.system.processes import own_command
from trainer.system.redact import redact_words

WRONG_RECIPE = 2
"""Exit code of a setting that cannot work: it will not go away."""

INTERRUPTED = 130
SECONDS_TO_NOTICE = 1.0
"""Schedulers signal every process of a job: a run that says within this time that it has heard is not told again, for
a second signal ends it at once."""


@dataclass(frozen=True)
class Outcome:
    """What follows from the end of an attempt: an exit code to leave with, or another attempt."""

    status: str
    code: int


class Supervisor:
    """Starts the attempts of one run, one after the other.

    Args:
        command: of the run.
        policy: when it is started again.
        grace: seconds that a run which was asked to stop may take; ``None`` for as long as it takes.
    """

    def __init__(self, command: FitCommand, policy: Policy, grace: float | None = None) -> None:
        self.command, self.policy, self.grace = command, policy, grace
        self.run_dir = Path(command.run_dir)
        self.journal = Journal(self.run_dir, command.words())
        self.asked: list[int] = []

    def run(self) -> int:
        """Attempt after attempt; the exit code of the last one, as a shell gives it."""
        before = {number: signal.signal(number, self._ask) for number in stop_signals()}
        try:
            while (outcome := self._attempt()) is None:
                pass
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.journal.close(outcome.status)
        return outcome.code

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not (self.asked and is_hangup(number)):
            self.asked.append(number)

    def _attempt(self) -> Outcome | None:
        """One attempt, and the wait for the next one; what to leave with, if there is none."""
        if self.asked:
            return Outcome("stopped", EXIT_REQUEUE)
        words = self.command.words()
        self.journal.begin(newest_step(self.run_dir), words)
        kills, before, began = kernel_kills(), attempts(self.run_dir), time.time()
        attempt = Attempt(own_command(*words))
        try:
            ending = self._watched(attempt)
        finally:
            attempt.kill()
        step = newest_step(self.run_dir)
        self.journal.end(ending.code, ending.cause, step)
        if (outcome := self._final(ending)) is not None:
            return outcome
        decision = self._decide(ending, step, kernel_kills() - kills, before)
        newest = f"newest checkpoint: step {step}" if step >= 0 else "no checkpoint yet"
        say(f"the run ended after {time.time() - began:.0f} s ({ending.describe()}); {newest}; {decision.why}")
        if isinstance(decision, Stop):
            return Outcome("failed", ending.exit_code)
        self._sleep(decision.wait)
        return None

    def _watched(self, attempt: Attempt) -> Ending:
        """Wait for the end of an attempt, and pass on what this process is asked meanwhile: once, and then by force."""
        passed_on = killed = False
        asked_at: float | None = None
        while (ending := attempt.wait()) is None:
            if not self.asked or killed:
                continue
            now = time.monotonic()
            asked_at = now if asked_at is None else asked_at
            late = self.grace is not None and now - asked_at > self.grace
            if len(self.asked) > 1 or late:
                say("killing the run" + (f": it has not ended within {self.grace:g} s" if late else ""))
                attempt.kill()
                killed = True
            elif not passed_on and not attempt.noted and now - asked_at > SECONDS_TO_NOTICE:
                attempt.signal(self.asked[0])
                passed_on = True
        return ending

    def _final(self, ending: Ending) -> Outcome | None:
        """What to leave with when no restart is wanted, whatever the count says."""
        if ending.code == 0:
            return Outcome("finished", 0)
        if ending.exit_code == EXIT_REQUEUE:  # a signal to the whole job may reach this process last
            self._sleep(SECONDS_TO_NOTICE)
        if ending.exit_code == INTERRUPTED:
            return Outcome("interrupted", INTERRUPTED)
        if self.asked:
            died_of_it = ending.code == -self.asked[0]  # before it could note it: nothing was lost
            return Outcome("stopped", EXIT_REQUEUE if died_of_it else ending.exit_code)
        if ending.code == WRONG_RECIPE:
            say("the recipe cannot work, and would not another time either: no restart")
            return Outcome("failed", WRONG_RECIPE)
        return None

    def _decide(self, ending: Ending, step: int, kills: int, before: int) -> Restart | Stop:
        if ending.code == EXIT_REQUEUE:
            return self.policy.after_preemption(step)
        if not ran_out_of_memory(ending, kills):
            return self.policy.after_crash(step, ending.describe())
        cut = known_cut(self.run_dir, before)
        smaller = None if cut is None else cut[1] // 2
        decision = self.policy.after_out_of_memory(step, smaller)
        if isinstance(decision, Restart) and cut is not None and smaller:
            self.command = self.command.cut_smaller(cut[0], smaller)
        return decision

    def _sleep(self, seconds: float) -> None:
        """Wait, but no longer than until this process is asked to stop."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.asked:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def announce(command: FitCommand) -> None:
    """Say what is started, and where it writes."""
    say(f"run directory {command.run_dir}: trainer {shlex.join(redact_words(command.words()))}")


# Whether a run that has ended is started again, when, and how: decided from how it ended and what it has saved.

LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Restart:
    """Start again, after ``wait`` seconds."""

    wait: float
    why: str


@dataclass(frozen=True)
class Stop:
    """Do not start again: ``why`` says so to the person."""

    why: str


@dataclass
class Policy:
    """Counts restarts; both counts begin anew when a newer checkpoint is there.

    Args:
        allowed: restarts, at most.
        patience: crashes in a row with the same newest checkpoint after which it is no use.
        first_wait: seconds before the first restart; twice as long before each further one, up to a minute.
        newest: step of the newest checkpoint; -1 for none.
    """

    allowed: int
    patience: int
    first_wait: float
    newest: int = -1
    used: int = field(default=0, init=False)
    crashes: int = field(default=0, init=False)

    def after_crash(self, step: int, cause: str) -> Restart | Stop:
        """What to do after a crash, with the newest checkpoint at ``step``."""
        self._progress(step)
        self.crashes += 1
        if self.crashes >= self.patience and self.allowed:
            since = f"step {self.newest}" if self.newest >= 0 else "the start"
            return Stop(
                f"{self.crashes} crashes in a row without a checkpoint after {since}: it would crash again ({cause})"
            )
        return self._restart()

    def after_out_of_memory(self, step: int, smaller: int | None) -> Restart | Stop:
        """As :meth:`after_crash`, where the next attempt has micro-batches of ``smaller`` samples.

        Crashes before it say nothing of that one. ``None`` where they cannot be made smaller; 0 after micro-batches of
        one sample.
        """
        if smaller == 0:
            return Stop("out of memory with micro-batches of one sample: docs/faults.md says what else may help")
        if smaller is None:
            return self.after_crash(step, "out of memory, and it is not known how to cut its batches smaller")
        self._progress(step)
        self.crashes = 0
        return self._restart(f" with micro-batches of {smaller}")

    def after_preemption(self, step: int) -> Restart | Stop:
        """As :meth:`after_crash`, for a run that was asked to stop while this process was not."""
        self._progress(step)
        return self._restart()

    def _progress(self, step: int) -> None:
        if step > self.newest:
            self.newest, self.used, self.crashes = step, 0, 0

    def _restart(self, how: str = "") -> Restart | Stop:
        if self.used >= self.allowed:
            return Stop(f"all {self.allowed} restarts are used up" if self.allowed else "no restart is allowed")
        wait = min(LONGEST_WAIT, self.first_wait * 2**self.used)
        self.used += 1
        return Restart(wait, f"restart {self.used} of {self.allowed}{how} in {wait:g} s")
