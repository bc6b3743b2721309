"""Mistakes of a classifier: the most confident wrong predictions and the confusion matrix of an evaluation."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.report.plots import plot_confusion
from trainer.system.files import write_atomic
from trainer.system.redact import redact
from trainer.system.text import escaped
from trainer.values import IGNORED_LABEL, Loss

MAX_MISTAKES = 200
"""Max mistakes to keep of an evaluation."""

MAX_CLASSES_LISTED, MAX_CLASSES_DRAWN = 1_000, 30
"""Max classes in confusion.csv and in its picture: those with the most mistakes."""


class Mistake(NamedTuple):
    """A sample that was predicted as another class."""

    position: int  # index of the sample in its split
    target: int
    prediction: int
    probability: float  # probability of the prediction
    of_target: float  # probability of the target


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    """Gather the tensors of all ranks, of the same shape, in the order of ranks. A collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


class TopMistakes:
    """Collects the most confident mistakes over all ranks, without waiting for the device.

    Uses losses with logits of shape ``(samples, classes)`` and targets ``(samples,)``, in the order of the samples.
    Keeps nothing unless ``wanted``, which requires samples with one class each.
    """

    def __init__(self, wanted: bool = True, device: torch.device | str = "cpu") -> None:
        self.wanted = wanted
        self.samples: Sequence[int] = ()
        # (MAX_MISTAKES, 5): the fields of a Mistake with the probability first; -1 for unused rows
        self.rows = torch.full((MAX_MISTAKES, 5), -1.0, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Remove all mistakes."""
        self.rows.fill_(-1.0)

    def update(self, loss: Loss) -> None:
        """Add the mistakes of a loss of the micro-batch with the current ``samples``."""
        logits, targets, count = loss.logits, loss.targets, len(self.samples)
        if not self.wanted or logits is None or targets is None:
            return
        if logits.ndim != 2 or len(logits) != count or targets.shape != (count,) or targets.is_floating_point():
            return
        shares = logits.float().softmax(-1)
        surest, predictions = shares.max(-1)
        wrong = (predictions != targets) & (targets != IGNORED_LABEL) & surest.isfinite()
        of_targets = shares.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        positions = torch.tensor(self.samples, device=logits.device)
        found = [torch.where(wrong, surest, -1.0), positions, targets, predictions, of_targets]
        rows = torch.cat([self.rows, torch.stack([column.double() for column in found], -1)])
        self.rows = rows[rows[:, 0].topk(MAX_MISTAKES).indices]

    def worst(self) -> list[Mistake] | None:
        """Return the most confident mistakes of all ranks (a collective); ``None`` if not wanted."""
        if not self.wanted:
            return None
        found = torch.cat(of_all_ranks(self.rows)).tolist()
        rows = sorted((row for row in found if row[0] >= 0), key=lambda row: (-row[0], row[1]))
        return [Mistake(int(at), int(target), int(said), p, q) for p, at, target, said, q in rows[:MAX_MISTAKES]]


def write_mistakes(
    folder: Path,
    confusion: np.ndarray,
    mistakes: Sequence[Mistake] | None,
    names: Sequence[str],
    split: str,
    describe: Callable[[int], str],
) -> None:
    """Write ``confusion.csv``, ``confusion.png``, and ``errors.csv`` with the files or rows of the mistakes.

    ``confusion`` has counts of shape (classes, classes): row = target, column = prediction. ``describe`` returns the
    file or row of a sample of ``split``.
    """
    names = [escaped(name) for name in names]
    chosen = _most_confused(confusion, MAX_CLASSES_LISTED)
    header = ["true class, predicted as", *(names[k] for k in chosen)]
    rows = [[names[k], *confusion[k, chosen].tolist()] for k in chosen]
    write_atomic(folder / "confusion.csv", _table(header, rows))
    columns = ["split", "position", "sample", "true", "predicted", "probability", "probability_of_true"]
    lines = [
        [split, at, escaped(redact(describe(at))), names[target], names[said], f"{p:.6f}", f"{q:.6f}"]
        for at, target, said, p, q in mistakes or ()
    ]
    if mistakes is not None:
        write_atomic(folder / "errors.csv", _table(columns, lines))
    drawn = _most_confused(confusion, MAX_CLASSES_DRAWN)
    some = "" if len(drawn) == len(names) else f", {len(drawn)} of {len(names):,} classes: those with the most mistakes"
    title = f"{split}: what each class is taken for{some}"
    plot_confusion(confusion[np.ix_(drawn, drawn)], [names[k] for k in drawn], title, folder / "confusion.png")


def _most_confused(confusion: np.ndarray, max_classes: int) -> np.ndarray:
    """Return at most ``max_classes`` classes in order: those with the most mistakes, as target or as prediction."""
    if len(confusion) <= max_classes:
        return np.arange(len(confusion))
    wrong = confusion.sum(0) + confusion.sum(1) - 2 * confusion.diagonal()
    return np.sort(np.argsort(-wrong, kind="stable")[:max_classes])


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
