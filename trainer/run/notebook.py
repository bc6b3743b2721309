"""Training with several ranks from where Fabric cannot start them: a notebook, or any Python without a script."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.errors import EXIT_REQUEUE, RecipeError, RunError, Stopped, require
from trainer.launching.world import find_world
from trainer.recipe import Recipe
from trainer.run.directory import with_absolute_paths
from trainer.settings import class_of, dump_recipe, settings_of
from trainer.system.files import default_folder, write_atomic
from trainer.system.processes import Watched, own_command
from trainer.system.reports import ERROR, Said

ALONE = "train on one device (Run(devices=1)), or write the recipe to a .py file and start trainer fit FILE.py"


def is_interactive() -> bool:
    """Whether there is no script that other processes could be started from; there is one in any rank."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    return not os.path.isfile(script) and "LOCAL_RANK" not in os.environ


def needs_processes(recipe: Recipe) -> bool:
    """Whether a run takes several ranks that neither a launcher has started nor Fabric can start from here."""
    if not is_interactive():
        return False
    world = find_world(recipe)[1]
    return world.started_by_fabric and world.size > 1


def fit_beside(recipe: Recipe) -> Path:
    """Train as ``recipe`` says, in processes of its own that end with this one; what they print is printed here.

    Returns:
        The run directory.

    Raises:
        RecipeError: also for a recipe that other processes cannot be told: with a class of ``__main__``, say.
        RunError: with the last error of theirs.
        Stopped: when they were asked to stop, as by the interrupt of this process: everything is saved then.
    """
    _require_tellable(recipe)
    run_dir = Path(recipe.run.dir or default_folder(None)).absolute()
    told = recipe.replace(run=dataclasses.replace(recipe.run, dir=str(run_dir)))
    with tempfile.TemporaryDirectory(prefix="trainer-fit-") as folder:
        path = Path(folder) / "recipe.yaml"
        write_atomic(path, dump_recipe(with_absolute_paths(told), None))
        # Trusted: what the classes are of is imported here already.
        command = own_command("fit", str(path), "--trust-recipe")
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks, said = Watched(command, os.environ, errors="replace", **streams), Said()
        try:
            code = _relayed(ranks.process, said)
        finally:
            ranks.kill()
    if code == EXIT_REQUEUE:
        raise Stopped(said.reason)
    if code != 0:
        kind = RecipeError if code == 2 else RunError
        raise kind(said.reason or f"the processes of the run ended with {code}")
    return run_dir


def _relayed(process: subprocess.Popen[str], said: Said) -> int:
    """Print what a process prints until it ends, an interrupt passed on to it; its exit code."""
    while True:
        try:
            for line in process.stdout or ():
                said.note(line)
                if ERROR not in line:
                    print(line, end="", flush=True)
            return process.wait()
        except KeyboardInterrupt:  # noqa: PERF203
            process.send_signal(signal.SIGINT)


def _require_tellable(recipe: Recipe) -> None:
    said = f"run.devices={recipe.run.devices} in a notebook"
    for part in (recipe.model, recipe.data):
        name = class_of(part)
        why = f"{said}: {name.rpartition('.')[2]} is defined here, where the processes of other ranks cannot find it"
        fix = "put it into a .py file beside the notebook and import it from there"
        require(not name.startswith("__main__."), f"{why}: {fix}, or {ALONE}")
    sections: dict[str, Any] = {"": recipe, "model.": recipe.model, "data.": recipe.data, "optim.": recipe.optim}
    told = settings_of(recipe)
    for prefix, section in sections.items():
        for field in dataclasses.fields(section):
            key, value = f"{prefix}{field.name}", getattr(section, field.name, None)
            held = not field.init or key in told or dataclasses.is_dataclass(value) or not value
            why = f"{said}: {key} is no plain value, which the processes of other ranks could be told"
            require(held, f"{why}: {ALONE}")
