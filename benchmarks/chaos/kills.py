"""Runs that are killed, at any instant and in every place of a save, and runs that are asked to stop."""

from __future__ import annotations

import signal
import time

from trainer.errors import EXIT_REQUEUE

from .compare import newest_step
from .failpoints import NAMES, OF_EVERY_RANK, VARIABLE
from .run import ForkedRun
from .trial import STEPS, Trial

SAVES = 6
"""Checkpoints of a run."""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def kill(trial: Trial) -> None:
    """SIGKILL to one rank or, one time in four, to all, at any instant; then, one time in four, to the resumed run."""
    again = trial.random.random() < 0.25
    ended = _kill_once(trial) or (again and _kill_once(trial))
    if ended:
        trial.compare()
    else:
        trial.finish()


def _kill_once(trial: Trial) -> bool:
    """Whether the run had ended before."""
    ranks = range(trial.shape.ranks)
    everybody = trial.random.random() < 0.25
    victims = list(ranks) if everybody or len(ranks) == 1 else [trial.any_rank()]
    # Only a launcher knows at once of a rank that died before it met the others: those miss it after 45 s.
    first = 0 if trial.launched or len(victims) == len(ranks) else 1
    left = STEPS - newest_step(trial.folder / "run")
    step = trial.random.randint(min(first, left), left)
    run = trial.start()
    trial.outcome.what += f"SIGKILL to {victims} in step {step} of those left; "
    if step:
        run.wait_for_step(step, victims[0])
    trial.pause(0.06 if step else 1.0)
    if run.finished():
        trial.outcome.what += "which it had ended before"
        trial.closed(run)
        return True
    run.send(victims, signal.SIGKILL)
    trial.ended(run, time.monotonic())
    if len(victims) < len(ranks) and step > 1:
        _names_victim(trial, run, victims[0])
    return False


def _names_victim(trial: Trial, run: ForkedRun, victim: int) -> None:
    with_store = "|launcher or the first rank has ended" if victim == 0 and not trial.launched else ""
    trial.names(run, f"rank {victim} .*killed{with_store}")


def kill_in_save(trial: Trial) -> None:
    """SIGKILL of a rank at a failpoint of a save: all of them in turn, in each of the first six saves."""
    place = NAMES[trial.number % len(NAMES)]
    save = trial.number // len(NAMES) % SAVES + 1
    victim = trial.any_rank() if place in OF_EVERY_RANK else 0
    trial.outcome.what = f"SIGKILL of rank {victim} {place} of save {save}"
    run = trial.start(**{VARIABLE: f"{place}@{save}@{victim}"})
    trial.ended(run)
    if run.codes[victim] != -signal.SIGKILL:
        trial.outcome.deviations.append(f"rank {victim} was not killed: {run.codes}")
    if trial.shape.ranks > 1:
        _names_victim(trial, run, victim)
    trial.finish()


def stop(trial: Trial) -> None:
    """SIGTERM, SIGINT or SIGUSR1 to any ranks, with and without a straggler: exit code 75, and no step is lost."""
    count = trial.random.randint(1, trial.shape.ranks)
    ranks, number = sorted(trial.random.sample(range(trial.shape.ranks), count)), trial.random.choice(STOPS)
    straggler = trial.any_rank() if trial.number % 2 else None
    step = trial.random.randint(1, STEPS - 2)
    slow = {} if straggler is None else {"TRAINER_CHAOS": f"slow@{straggler}@0"}
    trial.outcome.what = f"{number.name} to {ranks} in step {step}, straggler: {straggler}"
    run = trial.start(**slow)
    run.wait_for_step(step, trial.any_rank())
    trial.pause(0.02)
    run.send(ranks, number)
    trial.ended(run, time.monotonic(), code=EXIT_REQUEUE)
    before = list(trial.samples.at)
    trial.finish()
    if trial.samples.redone:
        trial.outcome.deviations.append(f"stopped in step {before}, and {trial.samples.redone} steps taken again")
        trial.outcome.resumed_exactly = False


def stop_twice(trial: Trial) -> None:
    """A second signal ends a rank at once, and with it the run."""
    victim, number = trial.any_rank(), trial.random.choice(STOPS)
    trial.outcome.what = f"{number.name} to rank {victim} twice"
    run = trial.start(TRAINER_CHAOS=f"slow@{victim}@0")
    run.wait_for_step(trial.random.randint(2, STEPS - 2), victim)
    run.send([victim], number)
    time.sleep(0.01)  # two at once would be one
    run.send([victim], number)
    trial.ended(run, time.monotonic())
    trial.finish()
