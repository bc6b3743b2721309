"""Does a command survive SIGKILL at any instant: does it come to the same bits, and leave nothing behind?

``images`` is a tiny run as a person starts it, killed from its first import to its last save and resumed on another
world. The other scenarios are those of ``kill_scenarios.py``.
"""

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
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import hostile
import kill_scenarios
from chaos.command import PRELOADED
from chaos.compare import MEASURED, checkpoints, newest_step
from chaos.forks import children, in_forks, living_children
from chaos.run import RECIPE, ForkedRun, Shape
from chaos.trial import STEPS
from common import RESULTS, Record, table, workplace
from kill_scenarios import SCENARIOS, TO_END, TO_LEAVE, Digest, Outcome, cpu_seconds

WORLDS = (Shape("single", 1), Shape("ddp", 2), Shape("fsdp", 2))
LAUNCHERS = ("trainer fit", "torchrun")
VICTIMS = ("first process", "a rank", "all")
FLAGS = ("--run.deterministic", "true", "--run.resume", "auto", "--run.allow_change", '["memory.strategy"]')
"""The first keeps the bits the same on every world: what was resumed on another one can be compared with any."""

IMAGES = "images"
ORDER = (IMAGES, IMAGES, *SCENARIOS)
"""The scenarios in turn; twice as often the one that starts interpreters of its own."""

Spans = dict[str, float]


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
    number: int, at: int, share: float, victims: Sequence[str], spans: Spans, reference: Digest, folder: Path
) -> Outcome:
    """Kill a run once, look at what is left, resume it elsewhere, and compare what it comes to.

    A part of them is killed again, when it has been resumed, and goes on on a third world.
    """
    ways = list(product(LAUNCHERS, WORLDS, victims))
    launcher, world, victim = ways[at % len(ways)]
    outcome = Outcome(number, IMAGES, launcher, str(world), victim, share * spans[f"{launcher} {world}"])
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
    outcome.cpu_seconds = cpu_seconds()
    return outcome


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
    outcome.kills += 1
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
    """Return a row for each launcher and victim of the images, and for each other scenario."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(outcomes, key=lambda one: (ORDER.index(one["scenario"]), one["launcher"], one["victim"])):
        of_images = f"{IMAGES}, {one['launcher']}: {one['victim']}"
        groups.setdefault(of_images if one["scenario"] == IMAGES else one["scenario"], []).append(one)
    rows = []
    for name, found in groups.items():
        ended = [one["seconds"] for one in found if not one["finished"]]
        unsaved = sum(one["saved"] == 0 and not one["finished"] for one in found)
        has_checkpoints = any(one["saved"] for one in found)
        cells = [len(found), unsaved if has_checkpoints else "–", sum(one["finished"] for one in found)]
        slowest, cpu = max(ended, default=0.0), sum(one["cpu_seconds"] for one in found) / len(found)
        last = [sum(len(one["left"]) for one in found), sum(not one["deviations"] for one in found)]
        rows.append([name, *map(str, cells), f"{slowest:.1f} s", f"{cpu:.1f} s", *map(str, last)])
    return rows


def trials(kills: int, scenarios: Sequence[str]) -> list[tuple[int, str, int, float]]:
    """Return of each trial its number, its scenario, how many of that came before, and its share of the run's time."""
    order = [name for name in ORDER if name in scenarios]
    names = [order[number % len(order)] for number in range(kills)]
    places = [names[:number].count(name) for number, name in enumerate(names)]
    shares = [(at + 0.5) / names.count(name) for name, at in zip(names, places, strict=True)]
    return list(zip(range(kills), names, places, shares, strict=True))


def references(scenarios: Sequence[str], folder: Path, at_once: int) -> dict[str, Any]:
    """Return what nothing has disturbed: of each scenario seconds, result and files; of the images by world as well."""
    found: dict[str, Any] = {}
    if IMAGES in scenarios:
        ways = list(product(LAUNCHERS, WORLDS))
        jobs: list[Any] = []
        for at, way in enumerate(ways):
            (folder / f"undisturbed-{at}").mkdir()
            jobs.append(partial(undisturbed, *way, folder / f"undisturbed-{at}"))
        runs = dict(in_forks(jobs, at_once))
        different = [f"{way[0]} {way[1]}" for at, way in enumerate(ways) if runs[at]["digest"] != runs[0]["digest"]]
        seconds = {f"{launcher} {world}": runs[at]["seconds"] for at, (launcher, world) in enumerate(ways)}
        found[IMAGES] = {"seconds": seconds, "digest": runs[0]["digest"], "different": different}
    forked = [name for name in scenarios if name != IMAGES]
    if forked:
        base = kill_scenarios.prepared(folder)
        jobs = [
            partial(kill_scenarios.undisturbed, name, folder / f"undisturbed-{name}", base, 100 * at)
            for at, name in enumerate(forked)
        ]
        found |= {forked[at]: {**one, "base": str(base)} for at, one in in_forks(jobs, at_once)}
    return found


def tried(
    number: int, name: str, at: int, share: float, victims: Sequence[str], reference: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Do one trial; return its outcome as JSON has it."""
    if name == IMAGES:
        outcome = try_one(number, at, share, victims, reference["seconds"], reference["digest"], folder)
    else:
        outcome = kill_scenarios.try_forked(name, number, share, reference, Path(reference["base"]), folder)
    return asdict(outcome)


def main() -> None:
    """Kill, resume, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--scenarios", help="with semicolons (default: all)")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS, help="of the images")
    parser.add_argument("--share", type=float, default=1.0, help="of a run's time, from its start (default: all of it)")
    parser.add_argument("--go-on", action="store_true", help="with the kills that the file of an earlier call lacks")
    parser.add_argument("--at-once", type=int, default=1, help="trials side by side (default: 1)")
    parser.add_argument("--folder", type=Path, help="keeps the runs (default: none is kept)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the file of results")
    wanted = parser.parse_args()
    scenarios = wanted.scenarios.split(";") if wanted.scenarios else list(dict.fromkeys(ORDER))
    if unknown := [name for name in scenarios if name not in ORDER]:
        parser.error(f"--scenarios: no {', '.join(unknown)}; there are {'; '.join(dict.fromkeys(ORDER))}")
    for module in dict.fromkeys((*PRELOADED, *hostile.PRELOADED)):  # for what is forked
        import_module(module)
    settings = {
        "kills": wanted.kills,
        "scenarios": scenarios,
        "victims": list(wanted.victims),
        "share": wanted.share,
        "at_once": wanted.at_once,
    }
    record = Record("kills" if wanted.share == 1 else "kills_at_the_start", settings, wanted.results)
    outcomes: list[dict[str, Any]] = []
    if wanted.go_on:
        before = json.loads(record.path.read_text())
        if before["settings"] != settings:
            parser.error(f"--go-on: {record.path} is of {before['settings']}")
        outcomes = before["kills"]
    with workplace(wanted.folder) as folder:
        found = references(scenarios, folder, wanted.at_once)
        different = found.get(IMAGES, {}).get("different", [])
        spans = {name: one["seconds"] for name, one in found.items()}
        record.write(seconds_undisturbed=spans, worlds_that_differ=different, kills=outcomes)
        planned = trials(wanted.kills, scenarios)
        done = {one["number"] for one in outcomes}
        order = Random(0).sample(planned, len(planned))  # cut short, the instants still cover a run
        jobs = [
            partial(tried, number, name, at, share * wanted.share, wanted.victims, found[name], folder)
            for number, name, at, share in order
            if number not in done
        ]
        for _, outcome in in_forks(jobs, wanted.at_once):
            outcomes.append(outcome)
            record.write(
                as_promised=sum(not one["deviations"] for one in outcomes),
                cpu_seconds=round(sum(one["cpu_seconds"] for one in outcomes)),
                kills=outcomes,
            )
            if outcome["deviations"]:
                print(outcome, flush=True)
    record.write(complete=len(outcomes) == wanted.kills)
    header = ["killed", "kills", "before a checkpoint", "ended before", "slowest end", "CPU a kill"]
    print(table([*header, "left after 5 s", "as promised"], scores(outcomes)))
    sys.exit(any(outcome["deviations"] for outcome in outcomes) or bool(different))


if __name__ == "__main__":
    main()
