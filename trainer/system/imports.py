"""Faster imports of torch and Fabric, and imports of the user's code."""

from __future__ import annotations

import gc
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from trainer.errors import RecipeError
from trainer.system.status_line import show_status


def import_object(given: str, name: str) -> Any:
    """Import ``module.name``, which may be the user's code; ``given`` describes the setting for error messages."""
    module, _, last = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it hides no installed package
    try:
        return getattr(import_module(module), last)
    except Exception as error:  # the user's code may raise any error
        fix = "start in the folder that contains it, or add that folder to PYTHONPATH"
        raise RecipeError(f"{given} cannot be imported ({type(error).__name__}: {error}): {fix}") from error


@contextmanager
def quick_imports() -> Iterator[None]:
    """Make imports of torch and Fabric in this block faster.

    Garbage collection pauses. Fabric imports torchmetrics only to compare its version (lightning_fabric/utilities/
    imports.py), and torchmetrics imports scipy, matplotlib, torchvision and transformers, which takes 4 s of CPU time.
    In this block, Fabric compares the version of the installed distribution instead.
    """
    from lightning_utilities.core import imports

    if "torch" not in sys.modules:
        show_status("loading torch")
    compare = imports.compare_version

    def compare_installed(package: str, op: Callable[..., bool], version: str, use_base_version: bool = False) -> bool:
        if (package, op) == ("torchmetrics", operator.ge):
            return bool(imports.RequirementCache(f"torchmetrics>={version}"))
        return compare(package, op, version, use_base_version)

    logging.getLogger("torch.utils._pytree").addFilter(_drop_torchao_records)
    collects = gc.isenabled()
    gc.disable()
    imports.compare_version = compare_installed
    try:
        yield
    finally:
        imports.compare_version = compare
        if collects:
            gc.freeze()
            gc.unfreeze()  # moves the modules to the oldest generation, which is rarely collected
            gc.enable()


def _drop_torchao_records(record: logging.LogRecord) -> bool:
    return not any(str(getattr(value, "__module__", "")).startswith("torchao.") for value in record.args or ())
