"""``trainer doctor``: every check, a line each, and an exit code that says whether one failed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from trainer.commands import OwnFlags
from trainer.commands.recipes import asked_for
from trainer.errors import RecipeError, RunError, require
from trainer.recipe import Recipe
from trainer.system.imports import quick_imports
from trainer.system.waiting import doing

if TYPE_CHECKING:
    from trainer.doctor.subject import Finding

# What follows the flags imports torch: it is imported where it is used, so that --help answers at once.

ABOUT = "Check this machine, the data and the model before a run: each finding with its fix."
FLAGS = OwnFlags(switches={"json": "print the findings as JSON, and nothing else, on stdout"}, about=ABOUT)


def doctor(argv: list[str]) -> None:
    """Examine a recipe on this machine, and print what was found."""
    if asked := asked_for("doctor", "RECIPE", argv, FLAGS):
        report(asked.recipe, asked.reference, ("json", None) in asked.flags)


def report(recipe: Recipe, reference: str, as_json: bool) -> None:
    """Print what was found, as JSON too if that is asked for; a check that failed is a :class:`RunError` in the end."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    require(not launched, "trainer doctor starts ranks itself: start it without torchrun, and say --run.devices")
    began = time.perf_counter()
    found: list[Finding] = []
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        for finding in examine(recipe, reference):
            found.append(finding)
            print(finding.line(), flush=True)
    failed = [finding.check for finding in found if finding.status == "FAIL"]
    if as_json:
        content = {"recipe": reference, "failed": len(failed), "seconds": round(time.perf_counter() - began, 1)}
        print(json.dumps({**content, "findings": [finding.to_json() for finding in found]}, indent=1))
    if failed:
        raise RunError(f"{len(failed)} finding(s) that the run would fail of: {', '.join(dict.fromkeys(failed))}")


def examine(recipe: Recipe, reference: str) -> Iterator[Finding]:
    """Every finding, as soon as it is there; ``reference`` names the recipe to ``trainer fit``."""
    with quick_imports():
        from trainer.doctor import machine, samples
        from trainer.doctor.subject import Subject, fail, findings
        from trainer.launching.world import detect_world
        from trainer.run.forecast import decided

    try:
        recipe, world = decided(recipe, detect_world(recipe))
        subject = Subject(recipe, reference, world)
    except RecipeError as error:  # no device, or a launcher that is not known: nothing else can be looked at
        yield fail(str(error), check="devices")
        return
    for name, check in (
        ("libraries", machine.libraries),
        ("devices", machine.devices),
        ("run directory", machine.run_directory),
        ("process group", machine.process_group),
        ("model and data", samples.model_and_data),
        ("plan", samples.plan_of),
    ):
        doing(f"checking {name}")
        yield from findings(name, partial(check, subject))
    peak = machine.PeakMemory(subject)
    for name, check, needs_model in (
        ("host memory", machine.host_memory, False),
        ("shared memory", machine.shared_memory, False),
        ("disk space", machine.space, False),
        ("vocabulary", samples.vocabulary, True),
        ("samples", samples.samples, True),
        ("duplicates", samples.duplicates, True),
        ("checkpoint", machine.round_trip, True),
    ):
        if subject.ready or not needs_model:
            doing(f"checking {name}")
            yield from findings(name, partial(check, subject))
    doing("predicting peak memory")
    yield from findings("peak memory", peak.look)
