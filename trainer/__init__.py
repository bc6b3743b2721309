"""Fine-tune transformers in the memory you have, with the same gradient as the big-batch run that did not fit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.recipe import Data, Loss, Memory, Model, Optim, Recipe, RecipeError, Run

if TYPE_CHECKING:
    from trainer.cli import main
    from trainer.engine.accumulate import AccumulatingOptimizer
    from trainer.fit import evaluate, fit, predict

__version__ = "0.1.0"

# What needs torch, or the command line's parser, is imported on first use: `import trainer` stays instant.
_LAZY = {
    "AccumulatingOptimizer": "trainer.engine.accumulate",
    "evaluate": "trainer.fit",
    "fit": "trainer.fit",
    "main": "trainer.cli",
    "predict": "trainer.fit",
}

__all__ = [
    "AccumulatingOptimizer",
    "Data",
    "Loss",
    "Memory",
    "Model",
    "Optim",
    "Recipe",
    "RecipeError",
    "Run",
    "evaluate",
    "fit",
    "main",
    "predict",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
