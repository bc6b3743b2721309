"""NeMo Automodel 0.6.0, before a fix: sequence classifiers had one mean per micro-batch and rank.

The gradient was as many times too large as there are micro-batches: issue 3829, fixed by #3830 in 0.7.0.
It imports mlflow and wandb for its log, which is not used here, so modules without a run take their place.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

for name in ("mlflow", "wandb"):
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(active_run=lambda: None, run=None, __spec__=ModuleSpec(name, None))

# ruff: noqa: E402
from conformance.trainers import nemo

TITLE, VERSION_OF = "NeMo Automodel before a fix", "nemo-automodel"
DOCS = "https://github.com/NVIDIA-NeMo/Automodel/pull/3830"
FEATURES = nemo.FEATURES
train = nemo.train
