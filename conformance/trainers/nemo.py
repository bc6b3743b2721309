"""NeMo Automodel: its recipes ``train_ft`` and ``train_seq_cls`` with a configuration as in its guides.

The recipes ask for a GPU in a few places. To run on a CPU, ``torch.cuda``'s functions for memory and for the current
device return 0, modules stay where they are when they are moved to ``cuda``, and triton is hidden, because its kernels
do not import with triton 3.9. The model and the data are named by ``_target_``, so nothing is read from a hub.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

sys.modules["triton"] = sys.modules["triton.language"] = None  # type: ignore[assignment]

# ruff: noqa: E402
import torch
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from nemo_automodel.recipes.llm.train_seq_cls import TrainFinetuneRecipeForSequenceClassification
from torch import nn

from conformance.cases import IGNORED, LEARNING_RATE
from conformance.job import Job, UnsupportedError
from conformance.verdict import DECAY, MOMENTUM

TITLE, VERSION_OF = "NeMo Automodel", "nemo-automodel"
DOCS = "https://docs.nvidia.com/nemo/automodel/latest/guides/llm/finetune.html"
FEATURES = {"ranks", "clip", "momentum", "schedule"}
JOBS: list[Job] = []


def model() -> nn.Module:
    """Return the model of the case."""
    module = JOBS[-1].module
    if JOBS[-1].case.is_custom:  # a model returns logits, or an object that has them
        module.register_forward_hook(lambda module, args, outputs: outputs["logits"])
    return module


def rows(tokenizer: Any = None) -> Any:
    """Return the samples of the case."""
    return JOBS[-1].dataset


def collate(samples: Any) -> Any:
    """Return a micro-batch; the labels of its datasets of text are shifted already."""
    batch, case = JOBS[-1].collate(samples), JOBS[-1].case
    if case.task == "causal_lm":
        batch["labels"] = torch.cat([batch["labels"][:, 1:], torch.full((len(samples), 1), IGNORED)], 1)
    return batch


def train(job: Job) -> None:
    """Train with the configuration of the page."""
    case = job.case
    recipes = {
        "causal_lm": TrainFinetuneRecipeForNextTokenPrediction,
        "classifier": TrainFinetuneRecipeForSequenceClassification,
    }
    if case.task not in recipes or case.model in ("weighted", "smoothed", "two losses"):
        raise UnsupportedError("it has no recipe for this loss")
    JOBS.append(job)
    for name in ("reset_peak_memory_stats", "empty_cache", "max_memory_allocated", "current_device"):
        setattr(torch.cuda, name, lambda *_, **__: 0)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    size = case.micro_batch_size * case.accumulation * case.ranks
    steps = {"global_batch_size": size, "local_batch_size": case.micro_batch_size, "num_epochs": case.epochs}
    more = {"momentum": MOMENTUM, "weight_decay": DECAY} if job.needs("momentum") else {}
    settings: dict[str, Any] = {
        "step_scheduler": steps | {"ckpt_every_steps": 1000, "val_every_steps": 1000},
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "model": {"_target_": f"{__name__}.model"},
        "checkpoint": {"enabled": False, "checkpoint_dir": str(job.folder)},
        "distributed": {"strategy": "ddp"},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": f"{__name__}.rows"},
        "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader", "shuffle": False},
        "clip_grad_norm": {"max_norm": job.clip_norm or 1e9},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": LEARNING_RATE} | more,
    }
    settings["dataloader"]["collate_fn"] = f"{__name__}.collate"
    if job.needs("schedule"):
        settings["lr_scheduler"] = {"lr_decay_style": "linear", "lr_warmup_steps": 0, "min_lr": 0.0}
    recipe = recipes[case.task](ConfigNode(settings))
    with patch.object(nn.Module, "to", lambda self, *_, **__: self):
        recipe.setup()
    recipe.run_train_validation_loop()
