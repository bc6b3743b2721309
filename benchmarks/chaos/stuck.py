"""Ranks that raise, hang, or are stopped; data workers that die or hang."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from .forks import children
from .run import ForkedRun
from .trial import LIMIT, STEPS, Trial

HANG_AFTER = 3.0


def _in_some_step(trial: Trial, what: str, *flags: str) -> tuple[ForkedRun, int, float]:
    """A run in which one rank does ``what`` in some step after the first; that rank, and when it began to."""
    victim, step = trial.any_rank(), trial.random.randint(3, STEPS)
    micro_steps = 4 // trial.shape.ranks
    run = trial.start(*flags, TRAINER_CHAOS=f"{what}@{victim}@{(step - 1) * micro_steps + 1}")
    trial.outcome.what = f"{what} on rank {victim} in step {step}"
    run.wait_for_step(step, victim)
    return run, victim, time.monotonic()


def rank_raises(trial: Trial) -> None:
    """An error of a model's own code: rank, step, phase, samples, cause and traceback are there."""
    run, victim, since = _in_some_step(trial, "raise")
    trial.ended(run, since)
    trial.names(run, rf"rank {victim}, step \d+, forward, samples [\d, …]+: ZeroDivisionError: this is chaos")
    if "in disturb" not in run.text(victim):
        trial.outcome.named = False
        trial.outcome.deviations.append("no traceback")
    trial.finish()


def rank_hangs(trial: Trial) -> None:
    """A rank that sleeps for ever: found after ``run.hang_after``, with where it is."""
    run, victim, since = _in_some_step(trial, "hang", "--run.hang_after", str(HANG_AFTER))
    trial.ended(run, since, limit=HANG_AFTER + 5)
    trial.names(run, rf"rank {victim}, step \d+, forward, .*no progress for")
    trial.finish()


def rank_stopped(trial: Trial) -> None:
    """SIGSTOP: only another rank can notice."""
    victim, step = trial.any_rank(), trial.random.randint(2, STEPS - 1)
    trial.outcome.what = f"SIGSTOP to rank {victim} in step {step}"
    run = trial.start(TRAINER_CHAOS=f"slow@{victim}@0")
    run.wait_for_step(step, victim)
    run.send([victim], signal.SIGSTOP)
    trial.ended(run, time.monotonic(), limit=LIMIT)
    others = [run.codes[rank] for rank in run.codes if rank != victim]
    if not all(code > 0 for code in others):
        trial.outcome.deviations.append(f"the others ended with {others}")
    trial.names(run, f"rank {victim} .*stopped by a signal")
    trial.finish()


def worker(trial: Trial) -> None:
    """A data worker that is killed or stopped: named, unless it had loaded all that it owed.

    One that is stopped in the middle of handing over a micro-batch keeps the rank in torch's own code, which waits
    without a limit: the watchdog finds that rank after ``run.hang_after``.
    """
    trial.flags += ["--data.workers", "1", "--data.worker_timeout", "3", "--run.hang_after", "6"]
    victim, number = trial.any_rank(), trial.random.choice([signal.SIGKILL, signal.SIGSTOP])
    step = trial.random.choice([1, 7, 13])  # an epoch begins
    trial.outcome.what = f"{number.name} to the worker of rank {victim} in step {step}"
    run = trial.start(TRAINER_CHAOS=f"slow@{victim}@0")
    run.wait_for_step(step, victim)
    for pid in children(run.pids[victim]):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    since = time.monotonic()
    run.wait()
    if any(run.codes.values()):
        trial.ended(run, since)
        found = r"data worker 0 of 1 \(pid \d+\) (was killed by SIGKILL|has not answered for 3 s)"
        trial.names(run, rf"{found}|rank {victim}, .*loading.*: no progress")
        trial.finish()
    else:
        trial.outcome.what += ", who owed nothing"
        trial.outcome.codes = list(run.codes.values())
        trial.closed(run)
        trial.compare()
