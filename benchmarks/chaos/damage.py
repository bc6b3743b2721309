"""Bad numbers, damaged checkpoints, full disks, and two runs in one directory."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from .compare import checkpoints
from .run import ForkedRun
from .small_disk import NoSmallDisk, SmallDisk
from .trial import EVERY, STEPS, Trial

POISONED = 17
"""The sample that is not a number."""


def not_a_number(trial: Trial) -> None:
    """A sample of NaN in every epoch: these steps are skipped and logged as what they are, also when it is killed."""
    trial.flags += ["--data.poisoned", str(POISONED)]
    step = trial.random.randint(2, STEPS - 1)
    trial.outcome.what = f"sample {POISONED} is NaN; SIGKILL to all in step {step}"
    run = trial.start()
    run.wait_for_step(step)
    run.send(run.pids, signal.SIGKILL)
    trial.ended(run, time.monotonic())
    trial.finish()
    reference = trial.reference["digest"]
    losses = [row["loss"] for row in reference["losses"] if row["loss"]]
    logged = sum(loss == "nan" for loss in losses), sum(float(loss) == 0 for loss in losses)
    trial.outcome.named = logged == (3, 0) and reference["state"]["counters"]["skipped_steps"] == 3
    if not trial.outcome.named:
        trial.outcome.deviations.append(f"NaN and zero losses in metrics.csv: {logged}")


def corrupt(trial: Trial) -> None:
    """A file of the newest checkpoint is flipped in a bit, cut, emptied or removed: the one before it is resumed."""
    trial.flags = ["--checkpoint.asynchronous", "false"]
    run = trial.start(TRAINER_FAILPOINT=f"after rotation@{trial.random.randint(2, 6)}@0")
    trial.ended(run)
    newest = checkpoints(run.run_dir)[-1]
    path = trial.random.choice(sorted(path for path in newest.iterdir()))
    kind = trial.random.choice(["flip", "cut", "empty", "remove"])
    trial.outcome.what = f"{kind} {path.name} of {newest.name}"
    damage(path, kind, trial)
    trial.most_redone = 2 * EVERY + 1  # the newest checkpoint is lost, too
    trial.finish()
    said = (trial.folder / "output-1-0.txt").read_text()
    trial.outcome.named = re.search(f"warning: .*{newest.name}.*{re.escape(path.name)}", said) is not None
    if not trial.outcome.named:
        trial.outcome.deviations.append("the damaged file is not named")


def damage(path: Path, kind: str, trial: Trial) -> None:
    """Change a file behind the back of whoever wrote it."""
    content = bytearray(path.read_bytes())
    if kind == "remove":
        path.unlink()
        return
    if kind == "flip":
        content[trial.random.randrange(len(content))] ^= 1 << trial.random.randrange(8)
    elif kind == "cut":
        del content[trial.random.randrange(len(content)) :]
    else:
        content.clear()
    path.write_bytes(content)


def full_disk(trial: Trial) -> None:
    """A file system that is full before a save, or that becomes full in the middle of one; then it is made larger."""
    bytes_are_missing = trial.number % 2 == 0
    try:
        disk = SmallDisk(trial.folder / "run")
    except NoSmallDisk as error:
        trial.outcome.skipped = str(error)
        return
    step = trial.random.randint(1, STEPS - 2 * EVERY)
    run = trial.start(TRAINER_CHAOS="slow@0@0")
    run.wait_for_step(step)
    if bytes_are_missing:
        disk.fill()
    else:
        disk.no_more_files()
    trial.outcome.what = f"no {'bytes' if bytes_are_missing else 'inodes'} left from step {step} on"
    trial.ended(run, limit=2 * EVERY * 0.2 + 15)
    trial.names(run, r"no space for the checkpoint of step \d+: .* lacks [\d,]+ bytes|No space left on device")
    disk.make_room()
    trial.finish()


def two_runs(trial: Trial) -> None:
    """A second run in the same directory is refused by whose it is, and the first one does not notice."""
    first = trial.start(TRAINER_CHAOS="slow@0@0")
    first.wait_for_step(trial.random.randint(1, 4))
    second = ForkedRun(
        trial.folder / "second",
        trial.shape,
        "--run.resume",
        "auto",
        port=trial.port + 7,
        launched=trial.launched,
        run_dir=first.run_dir,
    )
    trial.outcome.what = "a second run with --run.resume auto"
    since = time.monotonic()
    second.wait()
    trial.outcome.codes = [second.codes[rank] for rank in sorted(second.codes)]
    trial.outcome.seconds = time.monotonic() - since
    trial.names(second, f"run.dir=.* is in use by the run of pid {first.pids[0]} ")
    first.wait()
    trial.outcome.ended_in_time = set(trial.outcome.codes) == {2} and not any(first.codes.values())
    if not trial.outcome.ended_in_time:
        trial.outcome.deviations.append(f"the first ended with {first.codes}, the second with {trial.outcome.codes}")
    trial.closed(first)
    trial.compare()
