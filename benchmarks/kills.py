"""Does a run survive SIGKILL at any instant, from its first import to its last save, on any other world?"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from chaos.command import PRELOADED
from chaos.compare import MEASURED, checkpoints, newest_step
from chaos.forks import children, in_forks, living_children
from chaos.run import RECIPE, ForkedRun, Shape
from chaos.trial import STEPS
from common import Record, table, workplace

WORLDS = (Shape("single", 1), Shape("ddp", 2), Shape("fsdp", 2))
LAUNCHERS = ("trainer fit", "torchrun")
VICTIMS = ("first process", "a rank", "all")
FLAGS = ("--run.deterministic", "true", "--run.resume", "auto", "--run.allow_change", '["memory.strategy"]')
"""The first keeps the bits the same on every world: what was resumed on another one can be compared with any."""

TO_END = 60.0
"""Seconds in which the others have to end when a rank was killed, even before all ranks had met."""

TO_LEAVE = 5.0
"""Seconds after the end of the first process in which nobody may be left."""


Spans = dict[str, float]
Digest = dict[str, Any]


@dataclass
class Outcome:
    """What came of a kill.

    Args:
        number: of the kill: it decides who is killed, and when.
        launcher: what had started the run.
        world: strategy and ranks.
        victim: who was killed.
        instant: seconds from the start of the first process to the kill.
        code: the first process's.
        seconds: from the kill to its end.
        saved: the newest checkpoint at that time, as a step.
        finished: whether the run had ended before.
        left: command lines of processes that were there :data:`TO_LEAVE` seconds later.
        worlds: on which it was resumed.
        deviations: all that is not as promised.
    """

    number: int
    launcher: str
    world: str
    victim: str
    instant: float
    code: int | None = None
    seconds: float = 0.0
    saved: int = 0
    finished: bool = False
    left: list[str] = field(default_factory=list)
    worlds: list[str] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)


def start(launcher: str, world: Shape, run_dir: Path, output: Path) -> subprocess.Popen[bytes]:
    """A run as a person starts it, slowed down so that a third of its time is training."""
    arguments = ["fit", str(RECIPE), "--run.dir", str(run_dir), "--memory.strategy", world.strategy, *FLAGS]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world.ranks}"]
        command = [*torchrun, "-m", "trainer", *arguments]
    else:
        command = [sys.executable, "-m", "trainer", *arguments, "--run.devices", str(world.ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINER_CHAOS": "slow@0@0"}
    with open(output, "ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )


def digest(run_dir: Path) -> Digest:
    """The bits that a finished run has come to, on whichever world: weights and losses."""
    with open(run_dir / "metrics.csv", newline="") as file:
        rows = [{name: text for name, text in row.items() if name not in MEASURED} for row in csv.DictReader(file)]
    weights = hashlib.sha256((run_dir / "model" / "model.safetensors").read_bytes()).hexdigest()
    return {"weights": weights, "losses": rows, "last": checkpoints(run_dir)[-1].name}


def undisturbed(launcher: str, world: Shape, folder: Path) -> dict[str, Any]:
    """How long a run takes that nothing disturbs, and what it comes to."""
    began = time.monotonic()
    process = start(launcher, world, folder / "run", folder / "output")
    code = process.wait()
    if code:
        raise RuntimeError(f"the undisturbed run ended with {code}: {(folder / 'output').read_text()[-2000:]}")
    return {"seconds": time.monotonic() - began, "digest": digest(folder / "run")}


def try_one(
    number: int, kills: int, victims: Sequence[str], spans: Spans, reference: Digest, folder: Path
) -> dict[str, Any]:
    """Kill a run once, look at what is left, resume it elsewhere, and compare what it comes to.

    A part of them is killed again, when it has been resumed, and goes on on a third world.
    """
    ways = list(product(LAUNCHERS, WORLDS, victims))
    launcher, world, victim = ways[number % len(ways)]
    outcome = Outcome(number, launcher, str(world), victim, (number + 0.5) / kills * spans[f"{launcher} {world}"])
    folder = folder / str(number)
    folder.mkdir()
    random, run_dir, output = Random(number), folder / "run", folder / "output"
    _kill(outcome, start(launcher, world, run_dir, output), victim, random)
    if outcome.finished:
        outcome.deviations += _differences(run_dir, reference)
    others = [other for other in WORLDS if other is not world]
    random.shuffle(others)
    if number % 4 == 0 and not outcome.finished:
        _kill_resumed(outcome, others[1], folder, number, random)
    _resume(outcome, others[0], folder, number, reference)
    if outcome.deviations:
        outcome.deviations.append(output.read_text(errors="replace")[-1500:])
    return asdict(outcome)


def _kill(outcome: Outcome, process: subprocess.Popen[bytes], victim: str, random: Random) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(outcome.instant)
    run_dir = Path(process.args[process.args.index("--run.dir") + 1])  # type: ignore[operator,index,union-attr]
    outcome.saved = newest_step(run_dir)
    outcome.finished = process.poll() is not None
    since, expected = time.monotonic(), 0
    if not outcome.finished:
        ranks = _ranks(process.pid)
        if victim == "a rank" and ranks:
            os.kill(random.choice(ranks), signal.SIGKILL)
            expected = 1
        elif victim == "all":
            os.killpg(process.pid, signal.SIGKILL)
            expected = -signal.SIGKILL
        else:
            process.kill()
            expected = -signal.SIGKILL
    try:
        outcome.code = process.wait(TO_END)
    except subprocess.TimeoutExpired:
        outcome.deviations.append(f"it has not ended after {TO_END:g} s")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    outcome.seconds = time.monotonic() - since
    left = living_children(TO_LEAVE)
    outcome.left = [_command(pid) for pid in left]
    outcome.deviations += [f"left behind: {words}" for words in outcome.left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    living_children(TO_LEAVE)
    if outcome.code not in (expected, 0 if newest_step(run_dir) == STEPS else expected):  # all saved: it may still end
        outcome.deviations.append(f"exit code {outcome.code} where {expected} is right")


def _ranks(pid: int) -> list[int]:
    """The ranks that a launcher, or the first rank, has started."""
    return [child for child in children(pid) if b"LOCAL_RANK=" in _read(child, "environ")]


def _command(pid: int) -> str:
    return f"pid {pid}: {_read(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')}"


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _forked(outcome: Outcome, world: Shape, folder: Path, number: int) -> ForkedRun:
    outcome.worlds.append(str(world))
    return ForkedRun(folder, world, *FLAGS, launched=True, port=20 * number, run_dir=folder / "run")


def _kill_resumed(outcome: Outcome, world: Shape, folder: Path, number: int, random: Random) -> None:
    run = _forked(outcome, world, folder, number)
    run.wait_for_step(random.randint(1, max(1, STEPS - newest_step(folder / "run"))))
    run.send([random.randrange(world.ranks)], signal.SIGKILL)
    if not run.wait():
        outcome.deviations.append(f"killed again, and not ended: {run.text(0)[-500:]}")
    if left := run.orphans():
        outcome.deviations.append(f"killed again, and {left} processes left behind")


def _resume(outcome: Outcome, world: Shape, folder: Path, number: int, reference: Digest) -> None:
    run = _forked(outcome, world, folder, number)
    if not run.wait() or any(run.codes.values()):
        outcome.deviations.append(f"resuming ended with {run.codes}: {[run.text(rank)[-1500:] for rank in run.codes]}")
        return
    outcome.deviations += _differences(folder / "run", reference)


def _differences(run_dir: Path, reference: Digest) -> list[str]:
    own = digest(run_dir)
    return [f"{name} differ" for name in own if own[name] != reference[name]]


def scores(outcomes: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row a launcher and victim."""
    rows = []
    for launcher, victim in product(LAUNCHERS, VICTIMS):
        found = [one for one in outcomes if (one["launcher"], one["victim"]) == (launcher, victim)]
        if not found:
            continue
        ended = [one["seconds"] for one in found if not one["finished"]]
        rows.append(
            [
                f"{launcher}: {victim}",
                str(len(found)),
                str(sum(one["saved"] == 0 and not one["finished"] for one in found)),
                str(sum(one["finished"] for one in found)),
                f"{max(ended, default=0.0):.1f} s",
                str(sum(len(one["left"]) for one in found)),
                str(sum(not one["deviations"] for one in found)),
            ]
        )
    return rows


def main() -> None:
    """Kill, resume, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--share", type=float, default=1.0, help="of a run's time, from its start (default: all of it)")
    parser.add_argument("--go-on", action="store_true", help="with the kills that the file of an earlier call lacks")
    parser.add_argument("--at-once", type=int, default=1, help="trials side by side (default: 1)")
    parser.add_argument("--folder", type=Path, help="keeps the runs (default: none is kept)")
    wanted = parser.parse_args()
    for module in PRELOADED:  # for the ranks that are forked to resume
        import_module(module)
    settings = {
        "kills": wanted.kills,
        "victims": list(wanted.victims),
        "share": wanted.share,
        "at_once": wanted.at_once,
    }
    record = Record("kills" if wanted.share == 1 else "kills_at_the_start", settings)
    outcomes: list[dict[str, Any]] = []
    if wanted.go_on:
        before = json.loads(record.path.read_text())
        if before["settings"] != settings:
            parser.error(f"--go-on: {record.path} is of {before['settings']}")
        outcomes = before["kills"]
    with workplace(wanted.folder) as folder:
        ways = [(launcher, world) for launcher in LAUNCHERS for world in WORLDS]
        jobs: list[Any] = []
        for at, way in enumerate(ways):
            (folder / f"undisturbed-{at}").mkdir()
            jobs.append(partial(undisturbed, *way, folder / f"undisturbed-{at}"))
        found = dict(in_forks(jobs, wanted.at_once))
        spans = {f"{launcher} {world}": found[at]["seconds"] for at, (launcher, world) in enumerate(ways)}
        reference = found[0]["digest"]
        different = [way for at, way in enumerate(ways) if found[at]["digest"] != reference]
        record.write(seconds_undisturbed=spans, worlds_that_differ=[str(way) for way in different])
        order = Random(0).sample(range(wanted.kills), wanted.kills)  # cut short, the instants still cover a run
        order = [number for number in order if number not in {one["number"] for one in outcomes}]
        within = {way: seconds * wanted.share for way, seconds in spans.items()}
        trial = partial(try_one, kills=wanted.kills, victims=wanted.victims, spans=within, reference=reference)
        jobs = [partial(trial, number, folder=folder) for number in order]
        for _, outcome in in_forks(jobs, wanted.at_once):
            outcomes.append(outcome)
            record.write(as_promised=sum(not one["deviations"] for one in outcomes), kills=outcomes)
            if outcome["deviations"]:
                print(outcome, flush=True)
    record.write(complete=True)
    header = ["killed", "kills", "before a checkpoint", "ended before", "slowest end", "left after 5 s", "as promised"]
    print(table(header, scores(outcomes)))
    sys.exit(any(outcome["deviations"] for outcome in outcomes) or bool(different))


if __name__ == "__main__":
    main()
