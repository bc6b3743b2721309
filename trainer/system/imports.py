"""Imports for a command that is to answer soon, and needs little of what the packages that it uses import."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


@contextmanager
def quick_imports() -> Iterator[None]:
    """What is imported inside costs half: nothing of it is garbage, and of Lightning only Fabric is wanted.

    The root of lightning also imports its trainer, and Fabric asks for the version of torchmetrics: with them come
    scipy, matplotlib, torchvision and transformers, three of the five seconds that ``trainer plan`` imports. Whoever
    wants something of lightning's root later gets it; torchmetrics is afterwards as if nobody had asked.
    """
    asked = [_deferred(name) for name in ("lightning", "torchmetrics") if name not in sys.modules]
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for root in asked:
            if root.__name__ == "torchmetrics" and "__getattr__" in vars(root):
                del sys.modules["torchmetrics"]
        if collects:
            gc.freeze()
            gc.unfreeze()  # modules are now of the oldest generation, unseen: few collections look through them
            gc.enable()


def _deferred(name: str) -> ModuleType:
    """The package ``name`` as it is before its own code has run, which does when something of it is asked for."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    run, root = spec.loader.exec_module, module_from_spec(spec)

    def load(attribute: str) -> Any:
        part = f"{name}.{attribute}"
        if part in sys.modules:  # in the midst of its own import, and asked for by what that imports
            return sys.modules[part]
        vars(root).pop("__getattr__", None)
        run(root)
        return getattr(root, attribute)

    vars(root).update(__version__=version(name), __getattr__=load)
    sys.modules[name] = root
    return root
