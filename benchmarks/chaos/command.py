"""``trainer chaos``: the trials, their scores, and what is printed and written of them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from trainer.errors import RunError, require
from trainer.report.summary import versions
from trainer.system.files import write_atomic
from trainer.system.machine import cores

from .compare import digest
from .damage import POISONED
from .faults import FAULTS
from .forks import in_forks
from .run import ForkedRun, Shape
from .trial import Outcome, Trial

PRELOADED = (
    "trainer.api",
    "trainer.commands.flags",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "sklearn.metrics",
    "tensorboard",
)
"""What every run imports: once here instead of once a rank."""


def parser() -> argparse.ArgumentParser:
    """The flags of ``python -m benchmarks.chaos``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--trials",
        type=_count,
        default=20,
        help="kills in all: half at any instant, half in a save; half as many stops, a twentieth of the rest (20)",
    )
    parser.add_argument("--out", type=Path, help="file for the scores as JSON (default: printed only)")
    parser.add_argument("--only", type=_faults, default=list(FAULTS), help="the faults to try, with commas (all)")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs of trials that deviate (none is kept)")
    parser.add_argument("--at-once", type=_count, default=cores(), help="trials at the same time (as many as cores)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def _faults(text: str) -> list[str]:
    if wrong := [name for name in text.split(",") if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: the faults are {', '.join(FAULTS)}")
    return text.split(",")


def chaos(trials: int, out: Path | None, only: Sequence[str], keep: Path | None, at_once: int) -> dict[str, Any]:
    """Try the faults and print a table; the arguments are those of :func:`parser`.

    Returns:
        The scores, as they are written.

    Raises:
        RecipeError: on a system without what this needs.
        RunError: when something was not as promised; the scores are written all the same.
    """
    require(sys.platform.startswith("linux"), "chaos forks processes and reads /proc: it needs Linux")
    require("TORCHELASTIC_RUN_ID" not in os.environ, "chaos starts its own ranks: start it without a launcher")
    began = time.monotonic()
    for module in PRELOADED:
        import_module(module)
    folder = Path(tempfile.mkdtemp(prefix="trainer-chaos-"))
    try:
        outcomes = _try_all(only, trials, at_once, folder)
    finally:
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    faults = {name: scores(found) for name, found in outcomes.items()}
    report = {
        "trials": trials,
        "seconds": round(time.monotonic() - began, 1),
        "versions": versions(),
        "machine": {"system": f"{platform.system()} {platform.machine()}", "cores": cores(), "at_once": at_once},
        "faults": faults,
    }
    print(table(faults))
    if out is not None:
        write_atomic(out, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    deviating = [name for name, found in faults.items() if found["deviations"]]
    if deviating:
        raise RunError(f"not as promised: {', '.join(deviating)}; the deviations are listed above")
    return report


def _try_all(names: Sequence[str], asked: int, at_once: int, folder: Path) -> dict[str, list[Outcome]]:
    planned = [(name, number) for name in names for number in range(FAULTS[name].trials(asked))]
    shapes = {(name, number): FAULTS[name].shape(number, FAULTS[name].trials(asked)) for name, number in planned}
    wanted = list(dict.fromkeys((shapes[name, number], FAULTS[name].poisoned) for name, number in planned))
    made = _in_order([partial(_reference, *key, folder, 20 * at) for at, key in enumerate(wanted)], at_once)
    references = dict(zip(wanted, made, strict=True))
    jobs = []
    for at, (name, number) in enumerate(planned):
        shape = shapes[name, number]
        reference = references[shape, FAULTS[name].poisoned]
        jobs.append(partial(_one, name, Trial(name, number, shape, reference, folder, 20 * at)))
    found = _in_order(jobs, at_once, [f"{name} {number}" for name, number in planned])
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for (name, _), outcome in zip(planned, found, strict=True):
        outcomes[name].append(Outcome(**outcome))
    return outcomes


def _in_order(jobs: Sequence[Any], at_once: int, names: Sequence[str] = ()) -> list[Any]:
    """The results of ``jobs``; of those with names, what deviates is printed as it comes."""
    found: dict[int, Any] = {}
    for number, result in in_forks(jobs, at_once):
        found[number] = result
        if names and result["deviations"]:
            print(f"{names[number]} ({result['what']}): {'; '.join(result['deviations'])}", flush=True)
    return [found[number] for number in range(len(jobs))]


def _reference(shape: Shape, poisoned: bool, folder: Path, port: int) -> dict[str, Any]:
    """The undisturbed run: its digest, and the samples of every window of every rank."""
    flags = ["--data.poisoned", str(POISONED)] if poisoned else []
    run = ForkedRun(folder / f"{shape.strategy}-{shape.ranks}-{poisoned}", shape, *flags, port=port)
    run.wait()
    if any(run.codes.values()):
        raise RunError(f"the undisturbed run ended with {run.codes}: {run.text(0)[-2000:]}")
    return {"digest": digest(run.run_dir), "samples": [run.windows(rank) for rank in range(shape.ranks)]}


def _one(name: str, trial: Trial) -> dict[str, Any]:
    FAULTS[name].disturb(trial)
    trial.outcome.what = f"{trial.shape}: {trial.outcome.what}"
    if not trial.outcome.deviations:
        shutil.rmtree(trial.folder, ignore_errors=True)
    return asdict(trial.outcome)


def scores(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many of the trials of a fault went as promised."""
    tried = [outcome for outcome in outcomes if outcome.skipped is None]
    seconds = [outcome.seconds for outcome in tried if outcome.seconds is not None]
    skipped = sorted({outcome.skipped for outcome in outcomes if outcome.skipped is not None})
    return {
        "trials": len(tried),
        "ended_in_time": sum(outcome.ended_in_time for outcome in tried),
        "to_name": sum(outcome.named is not None for outcome in tried),
        "named": sum(outcome.named is True for outcome in tried),
        "resumed_exactly": sum(outcome.resumed_exactly for outcome in tried),
        "orphans": sum(outcome.orphans for outcome in tried),
        "most_steps_redone": max((outcome.redone for outcome in tried), default=0),
        "seconds_median": round(statistics.median(seconds), 2) if seconds else None,
        "seconds_max": round(max(seconds), 2) if seconds else None,
        "skipped": "; ".join(skipped) or None,
        "deviations": [f"{outcome.what}: {text}" for outcome in tried for text in outcome.deviations],
    }


def table(faults: dict[str, dict[str, Any]]) -> str:
    """A line a fault."""
    heads = ("in time", "named", "exact", "orphans", "redone", "seconds")
    lines = [f"{'fault':14}{'trials':>7}{''.join(map('{:>9}'.format, heads[:-1]))}{heads[-1]:>16}"]
    for name, row in faults.items():
        if not row["trials"]:
            lines.append(f"{name:14}skipped: {row['skipped']}")
            continue
        named = f"{row['named']}/{row['to_name']}" if row["to_name"] else "-"
        figures = (row["ended_in_time"], named, row["resumed_exactly"], row["orphans"], row["most_steps_redone"])
        seconds = f"{row['seconds_median']}, max {row['seconds_max']}"
        lines.append(f"{name:14}{row['trials']:7}{''.join(map('{:>9}'.format, figures))}{seconds:>16}")
    return "\n".join(lines)
