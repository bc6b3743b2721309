"""Starts several ranks from a notebook or another Python without a script, where Fabric cannot start them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_REQUEUE, RecipeError, RunError, RunStoppedError, require
from trainer.launching.world import resolve_world
from trainer.recipe import Recipe
from trainer.run.identity import with_absolute_paths
from trainer.settings import class_spec, dump_recipe, settings_of
from trainer.system.error_reports import ERROR, FailureReason
from trainer.system.files import default_folder, write_atomic
from trainer.system.processes import ProcessSession, trainer_command
from trainer.system.status_line import say

ALONE = "train on one device (Run(devices=1)), or write the recipe to a .py file and start trainer fit FILE.py"


def is_interactive() -> bool:
    """Return whether there is no script from which other processes could be started. Never true in a rank."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    return not os.path.isfile(script) and "LOCAL_RANK" not in os.environ


def needs_subprocess(recipe: Recipe) -> bool:
    """Return whether a run needs several ranks that no launcher started and Fabric cannot start from here."""
    if not is_interactive():
        return False
    world = resolve_world(recipe)[1]
    return world.started_by_fabric and world.world_size > 1


def fit_in_subprocess(recipe: Recipe) -> Path:
    """Train ``recipe`` in separate processes that end with this one, print their output here, and return the run
    directory. Raise their last error, RunStoppedError if they were asked to stop, or RecipeError if the recipe cannot
    be sent to them."""
    _require_yaml_serializable(recipe)
    run_dir = Path(recipe.run.dir or default_folder(None)).absolute()
    recipe = recipe.replace(run=dataclasses.replace(recipe.run, dir=str(run_dir)))
    with tempfile.TemporaryDirectory(prefix="trainer-fit-") as folder:
        path = Path(folder) / "recipe.yaml"
        write_atomic(path, dump_recipe(with_absolute_paths(recipe), None))
        # Trusted: this process has already imported the modules of its classes.
        command = trainer_command("fit", str(path), "--trust-recipe")
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks, said = ProcessSession(command, os.environ, errors="replace", **streams), FailureReason()
        try:
            code = _relayed(ranks.process, said)
        finally:
            ranks.kill()
    if code == EXIT_REQUEUE:
        raise RunStoppedError(said.reason)
    if code != 0:
        raise (RecipeError if code == 2 else RunError)(said.reason or f"the processes of the run ended with {code}")
    return run_dir


def _relayed(process: subprocess.Popen[str], said: FailureReason) -> int:
    """Print the output of a process until it ends, forward interrupts to it, and return its exit code."""
    while True:
        try:
            for line in process.stdout or ():
                said.add_line(line)
                if ERROR not in line:
                    say(line.removesuffix("\n"))
            return process.wait()
        except KeyboardInterrupt:  # noqa: PERF203
            process.send_signal(signal.SIGINT)


def _require_yaml_serializable(recipe: Recipe) -> None:
    setting = f"run.devices={recipe.run.devices} in a notebook"
    for part in (recipe.model, recipe.data):
        module, _, name = class_spec(part).rpartition(".")
        why = f"{setting}: {name} is defined in the notebook, where the processes of other ranks cannot import it"
        fix = f"put it into a .py file next to the notebook and import it from there, or {ALONE}"
        require(module.partition(".")[0] != "__main__", f"{why}: {fix}")
    sections: dict[str, Any] = {"": recipe, "model.": recipe.model, "data.": recipe.data, "optim.": recipe.optim}
    sent = settings_of(recipe)
    for prefix, section in sections.items():
        for field in dataclasses.fields(section):
            key, value = f"{prefix}{field.name}", getattr(section, field.name, None)
            if field.init and value and key not in sent and not dataclasses.is_dataclass(value):
                raise RecipeError(f"{setting}: {key} is not a plain value: it cannot be sent to other ranks: {ALONE}")
