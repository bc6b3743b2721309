"""``trainer doctor``: every check, a line each, and an exit code that says whether one failed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.commands.recipes import asked_for
from trainer.errors import RecipeError, RunError, require
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.doctor.finding import Finding

# What follows the flags imports torch: it is imported where it is used, so that --help answers at once.

SWITCHES = {"json": "print the findings as JSON, and nothing else, on stdout"}


def doctor(argv: list[str]) -> None:
    """``trainer doctor``."""
    if asked := asked_for("doctor", "RECIPE", argv, switches=SWITCHES):
        doctor_command(asked.recipe, asked.reference, asked.flags)


def doctor_command(recipe: Recipe, reference: str, flags: Sequence[tuple[str, str | None]]) -> None:
    """Examine ``recipe``, on this machine, and print what was found.

    Args:
        recipe: with all flags applied.
        reference: what names the recipe to ``trainer fit``.
        flags: all that were given; the command's own are ``SWITCHES``.

    Raises:
        RunError: when a check failed.
    """
    as_json = ("json", None) in flags
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    require(not launched, "trainer doctor starts ranks itself: start it without torchrun, and say --run.devices")
    began = time.perf_counter()
    found: list[Finding] = []
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        for finding in examine(recipe, reference):
            found.append(finding)
            print(finding.line(), flush=True)
    failed = [finding for finding in found if finding.status == "FAIL"]
    if as_json:
        content: dict[str, Any] = {"recipe": reference, "failed": len(failed)}
        content |= {"seconds": round(time.perf_counter() - began, 1)}
        print(json.dumps({**content, "findings": [finding.to_json() for finding in found]}, indent=1))
    if failed:
        names = ", ".join(dict.fromkeys(finding.check for finding in failed))
        raise RunError(f"{len(failed)} finding(s) that the run would fail of: {names}")


def examine(recipe: Recipe, reference: str) -> Iterator[Finding]:
    """Every finding, as soon as it is there."""
    from trainer.doctor import machine, probes, samples
    from trainer.doctor.finding import fail, findings
    from trainer.doctor.subject import Subject
    from trainer.launching.world import detect_world
    from trainer.planner.predict import prepared

    try:
        subject = Subject(recipe, reference, detect_world(recipe))
    except RecipeError as error:  # no device, or a launcher that is not known: nothing else can be looked at
        yield fail("devices", str(error))
        return
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("libraries", partial(machine.libraries, subject)),
        ("devices", partial(machine.devices, subject)),
        ("run directory", partial(machine.run_directory, subject)),
        ("process group", partial(probes.process_group, subject)),
        ("model and data", partial(samples.model_and_data, subject, prepared)),
        ("plan", partial(samples.plan_of, subject)),
    ]
    for name, check in checks:
        yield from findings(name, check)
    peak = probes.PeakMemory(subject)
    checks = [
        ("host memory", partial(machine.host_memory, subject)),
        ("shared memory", partial(machine.shared_memory, subject)),
        ("disk space", partial(machine.space, subject)),
    ]
    if subject.ready:
        checks += [
            ("vocabulary", partial(samples.vocabulary, subject)),
            ("samples", partial(samples.samples, subject)),
            ("duplicates", partial(samples.duplicates, subject)),
            ("checkpoint", partial(probes.round_trip, subject)),
        ]
    for name, check in [*checks, ("peak memory", peak.look)]:
        yield from findings(name, check)
