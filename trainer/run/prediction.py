"""What a trained model says of texts and images: without Fabric, for one process of one person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.export import load_model
from trainer.checkpoint.seal import require_sealed, require_sealed_text
from trainer.contract import Model
from trainer.errors import require
from trainer.recipe import Recipe
from trainer.report.progress import warn
from trainer.system.environment import first_here
from trainer.system.text import escaped
from trainer.system.waiting import doing

PREDICTION_BATCH = 32
"""Samples that are classified at once: few enough for any machine that can hold the model."""


def predict(
    recipe: Recipe, run_dir: str | Path, texts: list[str] | None = None, images: list[str] | None = None
) -> list[tuple[str, float]]:
    """The most probable class of each text or image, and its probability, by the model of ``run_dir``; also printed."""
    folder = checked(run_dir)
    model: Any = recipe.model.saved_in(folder) if recipe.model.own_format else recipe.model
    data: Any = recipe.data
    tokenizer = model.tokenizer_or_none()
    name = type(model).__name__
    require(not texts or tokenizer is not None, f"--text needs a text model; {name} reads images")
    require(not images or hasattr(data, "load_image"), f"--image needs an image model; {name} reads texts")
    doing("loading the model")
    module = load_model(model, folder).eval()
    doing("predicting")
    samples = texts or images or []
    names = model.class_names or []
    found = []
    for start in range(0, len(samples), PREDICTION_BATCH):
        chunk = samples[start : start + PREDICTION_BATCH]
        if texts:
            batch = dict(data.encode(chunk, tokenizer))
        else:
            batch = {"pixel_values": torch.stack([data.load_image(image) for image in chunk])}
        probabilities, classes = _probabilities(model, module, batch, len(chunk)).max(-1)
        for sample, probability, number in zip(chunk, probabilities.tolist(), classes.tolist(), strict=True):
            found.append((names[number] if names else str(number), probability))
            print(f"{escaped(found[-1][0])}\t{probability:.4f}\t{escaped(sample)}")
    return found


def checked(run_dir: str | Path) -> Path:
    """The folder of the trained model of ``run_dir``, when that is what the run has written.

    Raises:
        CorruptCheckpoint: naming the file that is not.
    """
    recipe, model = Path(run_dir) / "recipe.yaml", Path(run_dir) / "model"
    if first_here():  # before any process is started, or met
        found = require_sealed_text(recipe) if recipe.exists() else None, require_sealed(model)  # else from elsewhere
        for problem in filter(None, found):
            warn(problem)
    return model


@torch.no_grad()
def _probabilities(model: Model, module: nn.Module, batch: dict[str, Any], count: int) -> torch.Tensor:
    """Of every class, shape ``(count, classes)``."""
    batch["labels"] = torch.zeros(count, dtype=torch.long)  # no loss is read, but losses() wants some
    logits = next(model.losses(module, model.packed(batch))).logits
    require(logits is not None, f"{type(model).__name__}.losses gives no logits to predict with")
    assert logits is not None
    return logits.softmax(-1)
