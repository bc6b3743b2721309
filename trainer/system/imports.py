"""Imports: quick ones, for a command that is to answer soon, and those of the user's own code."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from typing import Any

from trainer.errors import RecipeError


def imported(given: str, name: str) -> Any:
    """What ``module.name`` stands for, of the user's own code; ``given`` is the setting that asks for it, in words."""
    module, _, last = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: what lies there goes before no package
    try:
        return getattr(import_module(module), last)
    except Exception as error:  # whatever that code raises
        fix = "start in the folder that it is in, or put that on PYTHONPATH"
        raise RecipeError(f"{given} cannot be imported ({type(error).__name__}: {error}): {fix}") from error


@contextmanager
def quick_imports() -> Iterator[None]:
    """What is imported inside costs half: nothing of it is garbage, and of Lightning only Fabric is wanted.

    The root of lightning also imports its trainer, and Fabric imports torchmetrics to compare its version
    (``_TORCHMETRICS_GREATER_EQUAL_1_0_0`` in lightning/fabric/utilities/imports.py): with them come scipy, matplotlib,
    torchvision and transformers. Whoever asks the root of lightning for more later gets it; torchmetrics is afterwards
    as if nobody had asked.
    """
    asked = [name for name in ("lightning", "torchmetrics") if name not in sys.modules and _defer(name)]
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in asked:
            unused = "__getattr__" in vars(sys.modules[name])
            if unused and not any(module.startswith(f"{name}.") for module in sys.modules):
                del sys.modules[name]
        if collects:
            gc.freeze()
            gc.unfreeze()  # modules are now of the oldest generation, unseen: few collections look through them
            gc.enable()


def _defer(name: str) -> bool:
    """Import the package ``name`` without its own code, which runs when something of it is asked for."""
    if (spec := find_spec(name)) is None or spec.loader is None:
        return False
    run, root = spec.loader.exec_module, module_from_spec(spec)

    def load(attribute: str) -> Any:
        if (part := f"{name}.{attribute}") in sys.modules:  # in the midst of its own import
            return sys.modules[part]
        vars(root).pop("__getattr__", None)
        run(root)
        return getattr(root, attribute)

    vars(root).update(__version__=version(name), __getattr__=load)
    sys.modules[name] = root
    return True
