"""Fine-tune transformers in the memory you have, with the same gradient as the big-batch run that did not fit."""

from __future__ import annotations

import os

if "LOCAL_RANK" in os.environ:  # a rank must end with its launcher, even during its imports
    from trainer.system.processes import end_with_launcher

    end_with_launcher()

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.contract import Data, Metric, Model
from trainer.errors import RecipeError
from trainer.recipe import Checkpoint, Memory, Optim, Recipe, Run
from trainer.values import DataSpec, Loss, PretrainedWeights, StoredTensor

if TYPE_CHECKING:
    from trainer.after.predict import predict
    from trainer.api import FinishedRun, evaluate, fit
    from trainer.cli import main
    from trainer.commands.recipes import load_recipe
    from trainer.commands.runs import load
    from trainer.engine.events import Listener
    from trainer.integrations.accumulate import AccumulatingOptimizer
    from trainer.planner.report import PlanReport
    from trainer.planner.search import plan
    from trainer.weights.streaming import tensors_in

__version__ = "0.1.0"

# Libraries look for a GPU when they are imported. With this setting torch asks NVML, the library of the driver.
# Otherwise it would initialise CUDA, which would break the processes that predictions fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# Names that need torch or the command line's parser are imported on first use, so that `import trainer` is fast.
_LAZY = {
    "AccumulatingOptimizer": "trainer.integrations.accumulate",
    "evaluate": "trainer.api",
    "FinishedRun": "trainer.api",
    "fit": "trainer.api",
    "Listener": "trainer.engine.events",
    "load": "trainer.commands.runs",
    "load_recipe": "trainer.commands.recipes",
    "PlanReport": "trainer.planner.report",
    "main": "trainer.cli",
    "plan": "trainer.planner.search",
    "predict": "trainer.after.predict",
    "tensors_in": "trainer.weights.streaming",
}

__all__ = [
    "AccumulatingOptimizer",
    "Checkpoint",
    "Data",
    "DataSpec",
    "FinishedRun",
    "Listener",
    "Loss",
    "Memory",
    "Metric",
    "Model",
    "Optim",
    "PlanReport",
    "PretrainedWeights",
    "Recipe",
    "RecipeError",
    "Run",
    "StoredTensor",
    "evaluate",
    "fit",
    "load",
    "load_recipe",
    "main",
    "plan",
    "predict",
    "tensors_in",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    from trainer.system.imports import quick_imports

    with quick_imports():
        return getattr(import_module(_LAZY[name]), name)
