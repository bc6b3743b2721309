"""A small run that is saved and resumed, and what tests compare of it."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from helpers.rounding import EPS
from trainer import Checkpoint, Memory, Optim, Recipe, Run
from trainer.api import fit
from trainer.data import Digits
from trainer.models import VisionTransformer

TINY = {"patch_size": 4, "layers": 2, "heads": 2, "width": 16, "mlp_width": 32, "dropout": 0.2}
OPTIM = Optim("adamw", lr=1e-2, weight_decay=0.1, schedule="cosine", warmup_steps=2, eps=EPS, clip_norm=1.0)


TESTED = 61
"""Of the images that are held out: with all 1,743 to evaluate takes longer than to train on 54."""


@dataclass
class FewDigits(Digits):
    """Digits for runs that are evaluated; the test set is of images from all over what is held out."""

    def _set_splits(self, train: Any, test: Any) -> None:
        rows = test.rows[:: len(test.rows) // TESTED][:TESTED]
        super()._set_splits(train, test._replace(rows=rows))


def recipe(run_dir: Path, **changes: Any) -> Recipe:
    """Two epochs of three steps (the last of 6 samples), saved after every second step."""
    run = changes.pop("run", {})
    memory = changes.pop("memory", {})
    settings: dict[str, Any] = {
        "model": VisionTransformer("custom", **TINY),
        "data": Digits(test_fraction=0.97),  # 54 samples to train on
        "optim": OPTIM,
        "batch_size": 24,
        "epochs": 2,
        "checkpoint": Checkpoint(every=2, keep_last=9),
        "memory": Memory(**{"micro_batch_size": 4} | memory),
        "run": Run(**{"dir": str(run_dir), "progress": False, "evaluate": False} | run),
    }
    return Recipe(**settings | changes)


def losses(run_dir: Path) -> list[float]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def assert_same_weights(run_dir: Path, other: Path, rtol: float, atol: float | None = None) -> None:
    """Of the models that two finished runs have written; ``atol`` is the other one where it is not given."""
    found, expected = (load_file(next((folder / "model").glob("*.safetensors"))) for folder in (run_dir, other))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol if atol is None else atol, msg=name)


def saved(run_dir: Path, step: int) -> dict[str, Any]:
    """Hashes of all tensors and random generators, and the state, of a checkpoint."""
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    manifest = json.loads((folder / "manifest.json").read_text())
    state = json.loads((folder / "state.json").read_text())
    del state["stopwatch"]
    return {"state": state} | {n: f["sha256"] for n, f in manifest["files"].items() if n.startswith("rank-")}


def resume(source: Path, run_dir: Path, step: int, **changes: Any) -> None:
    """Go on from a checkpoint of ``source`` in the new directory ``run_dir``."""
    run = changes.pop("run", {}) | {"resume": str(source / "checkpoints" / f"step-{step:08d}")}
    fit(recipe(run_dir, run=run, **changes))
