"""``trainer doctor``: run all checks, print a line for each finding, and fail if a check failed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.commands import CommandFlags
from trainer.commands.recipes import parse_command
from trainer.errors import RecipeError, RunError, require
from trainer.recipe import Recipe
from trainer.system.imports import quick_imports
from trainer.system.status_line import show_status

if TYPE_CHECKING:
    from trainer.doctor.context import Finding

# Modules that import torch are imported inside the functions, so that --help is fast.

FLAGS = CommandFlags(
    switches={"json": "print the findings as JSON, and nothing else, on stdout"},
    description="Check this machine, the data and the model before a run; each finding has a fix.",
)


def doctor(argv: list[str]) -> None:
    """Check a recipe on this machine, and print the findings."""
    if asked := parse_command("doctor", "RECIPE", argv, FLAGS):
        report(asked.recipe, asked.reference, ("json", None) in asked.flags)


def report(recipe: Recipe, reference: str, as_json: bool) -> None:
    """Print the findings, optionally as JSON; raise a :class:`RunError` at the end if a check failed."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    require(not launched, "trainer doctor starts ranks itself: start it without torchrun, and give --run.devices")
    began = time.perf_counter()
    found: list[Finding] = []
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        for finding in run_checks(recipe, reference):
            found.append(finding)
            print(finding.line(), flush=True)
    failed = [finding.check for finding in found if finding.status == "FAIL"]
    if as_json:
        content = {"recipe": reference, "failed": len(failed), "seconds": round(time.perf_counter() - began, 1)}
        print(json.dumps({**content, "findings": [finding.to_json() for finding in found]}, indent=1))
    if failed:
        raise RunError(f"{len(failed)} finding(s) would make the run fail: {', '.join(dict.fromkeys(failed))}")


def run_checks(recipe: Recipe, reference: str) -> Iterator[Finding]:
    """Yield the findings one by one; ``reference`` names the recipe for ``trainer fit``."""
    with quick_imports():
        from trainer.doctor import machine, samples
        from trainer.doctor.context import CheckContext, fail, findings
        from trainer.launching.world import detect_world
        from trainer.run.run_prediction import decided

    try:
        recipe, world = decided(recipe, detect_world(recipe))
        subject = CheckContext(recipe, reference, world)
    except RecipeError as error:  # no device or an unknown launcher: no other check is possible
        yield fail(str(error), check="devices")
        return
    checks: dict[str, Any] = {"libraries": machine.libraries, "devices": machine.devices}
    checks |= {"run directory": machine.run_directory, "process group": machine.process_group}
    checks |= {"model and data": samples.model_and_data, "plan": samples.plan_of}
    for name, check in checks.items():
        show_status(f"checking {name}")
        yield from findings(name, partial(check, subject))
    peak = machine.PeakMemory(subject)
    checks = {"host memory": machine.host_memory, "shared memory": machine.shared_memory}
    checks |= {"disk space": machine.disk_space}
    if subject.ready:
        checks |= {"vocabulary": samples.vocabulary, "samples": samples.samples, "duplicates": samples.duplicates}
        checks |= {"checkpoint": machine.round_trip}
    for name, check in checks.items():
        show_status(f"checking {name}")
        yield from findings(name, partial(check, subject))
    show_status("predicting peak memory")
    yield from findings("peak memory", peak.finding)
