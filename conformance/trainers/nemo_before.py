"""NeMo Automodel 0.6.0, before a fix: sequence classifiers had one mean per micro-batch and rank.

The gradient was as many times too large as there are micro-batches: issue 3829, fixed by #3830 in 0.7.0.
It imports mlflow for its log, which is not used here, so a module without a run takes its place.
"""

from __future__ import annotations

import sys
from types import ModuleType

sys.modules["mlflow"] = ModuleType("mlflow")
sys.modules["mlflow"].active_run = lambda: None  # type: ignore[attr-defined]

# ruff: noqa: E402
from conformance.trainers import nemo

TITLE, VERSION_OF = "NeMo Automodel before a fix", "nemo-automodel"
DOCS = "https://github.com/NVIDIA-NeMo/Automodel/pull/3830"
FEATURES = nemo.FEATURES
train = nemo.train
