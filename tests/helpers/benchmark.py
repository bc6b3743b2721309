"""Modules of ``benchmarks/``: they import each other by their bare names, and their folder stays on nobody's path."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks"


def imported(*names: str) -> list[ModuleType]:
    """These modules."""
    sys.path.insert(0, str(FOLDER))
    try:
        return [import_module(name) for name in names]
    finally:
        sys.path.remove(str(FOLDER))
