"""What the cut of a batch does to mixup and CutMix: ours, and timm's Mixup, which mixes each micro-batch by itself.

A small Vision Transformer on scikit-learn's digits, with batches of 64. timm's is in a plain loop that weighs every
micro-batch by its share of the batch, and its two ranks are two halves with seeds of their own, as in its train.py:
nothing differs but which samples are mixed, and by how much.
"""

from __future__ import annotations

import argparse
import csv
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Record, resolve, table
from torch.nn.functional import cross_entropy

from trainer.contract import without_weights
from trainer.engine.data_feed import fill_from_data
from trainer.engine.order import batch_indices

BATCH, ALPHAS = 64, (0.8, 1.0)
CUTS = {"micro-batches of 32": (32, 1), "micro-batches of 4": (4, 1), "2 ranks, of 32": (32, 2)}


def ours(size: int, ranks: int, steps: int, folder: Path) -> list[float]:
    """The losses of ``trainer fit``, in float64."""
    flags = {"data.mixup": ALPHAS[0], "data.cutmix": ALPHAS[1], "model.dropout": 0, "max_steps": steps}
    flags |= {"memory.micro_batch_size": size, "memory.precision": "64-true", "run.devices": ranks}
    flags |= {"run.dir": folder / f"{size}-{ranks}", "run.predict": "false", "run.evaluate": "false"}
    words = [f"--{name}={value}" for name, value in flags.items()]
    subprocess.run([sys.executable, "-m", "trainer", "fit", "vit_digits", *words], check=True, capture_output=True)
    with open(flags["run.dir"] / "metrics.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]


def timms(size: int, ranks: int, steps: int) -> list[float]:
    """Those of a plain loop with timm's Mixup."""
    from timm.data import Mixup

    recipe = resolve(["vit_digits", "--model.dropout", "0"])
    recipe.data.prepare()
    torch.manual_seed(0)
    module = fill_from_data(without_weights(recipe.model), recipe.data).build().double()
    mixes = [Mixup(*ALPHAS, label_smoothing=0.0, num_classes=10) for _ in range(ranks)]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    losses, train = [], recipe.data.train
    for number in range(steps):
        loss = 0.0
        indices = batch_indices(0, 0, number, len(train), BATCH)
        for rank, mix in enumerate(mixes):
            np.random.seed(1000 * number + rank)
            share = indices[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
            for at in range(0, len(share), size):
                batch = train.__getitems__(share[at : at + size])
                pixels, targets = mix(batch["pixel_values"].double().expand(-1, 3, -1, -1).clone(), batch["labels"])
                part = cross_entropy(module(pixels), targets.double(), reduction="sum") / BATCH
                part.backward()
                loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    record, found = Record("mixing", vars(arguments)), dict[str, dict[str, list[float]]]()
    rows: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        ways = {"ours": lambda *cut: ours(*cut, folder=Path(folder)), "timm's Mixup": timms}
        for name, way in ways.items():
            found[name] = {cut: way(*how, arguments.steps) for cut, how in CUTS.items()}
            first, *_ = found[name].values()
            for cut, losses in found[name].items():
                far = max(abs(one - other) / other for one, other in zip(losses, first, strict=True))
                rows.append((name, cut, f"{losses[1]:.12f}", f"{losses[-1]:.12f}", f"{far:.0e}" if far else "0"))
            record.write(losses=found)
    record.write(complete=True)
    print(table(("mixing", "cut of the batch", "loss of step 2", "of the last step", "largest difference"), rows))


if __name__ == "__main__":
    main()
