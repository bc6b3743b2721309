"""The ``trainer`` command.

It is outside of the package ``trainer``, because other distributions have a package of that name too. ``pip`` installs
them into the same folder without a warning, and this module says so."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

NAME = "exactbatch-trainer"


def entry() -> None:
    """Run the command line of ``trainer``, if the package of that name is ours."""
    if problem := find_problem():
        sys.exit(f"trainer: error: {problem}")
    from trainer.cli import entry as run

    run()


def find_problem() -> str | None:
    """Return why ``import trainer`` would not import this project, and the fix."""
    spec = find_spec("trainer")  # does not execute the package
    if spec is not None and spec.origin and "from trainer.recipe import" in Path(spec.origin).read_text("utf-8"):
        return None
    from importlib.metadata import packages_distributions

    place = (spec.origin or next(iter(spec.submodule_search_locations or ()))) if spec else "the package trainer"
    others = [name for name in packages_distributions().get("trainer", []) if name != NAME]
    cause = f"is not of {NAME}" + (f", but of {others[0]}, which has a package of the same name" if others else "")
    remove = f"pip uninstall {' '.join(others)}, then " if others else ""
    return f"{place} {cause}: {remove}pip install --force-reinstall --no-deps {NAME}"
