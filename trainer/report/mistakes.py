"""Which samples a classifier gets wrong, and what each class is taken for: kept during evaluation, written after it."""

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

MOST = 200
"""Mistakes that are kept of an evaluation."""

MOST_LISTED, MOST_DRAWN = 1_000, 30
"""Classes in confusion.csv, and in its picture: of more, those with the most mistakes."""


class Mistake(NamedTuple):
    """A sample that was taken for another class."""

    position: int  # its place in its split
    target: int
    prediction: int
    probability: float  # of the prediction
    of_target: float


def of_all_ranks(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, in their order, on every rank; they have the same shape. A collective."""
    if not (dist.is_available() and dist.is_initialized()):
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


class Mistakes:
    """The mistakes that the model was surest of, over all ranks, without ever waiting for the device.

    Only of losses whose logits have shape ``(samples, classes)`` and targets ``(samples,)``, in the samples' order.

    Args:
        wanted: whether samples have one class each; else nothing is kept.
        device: of the logits.
    """

    def __init__(self, wanted: bool = True, device: torch.device | str = "cpu") -> None:
        self.wanted = wanted
        self.samples: Sequence[int] = ()
        # (MOST, 5), the fields of a Mistake, with the probability first; -1 where there is none
        self.rows = torch.full((MOST, 5), -1.0, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Forget what was kept."""
        self.rows.fill_(-1.0)

    def update(self, loss: Loss) -> None:
        """Look at a loss of the micro-batch whose ``samples`` were set before."""
        logits, targets, count = loss.logits, loss.targets, len(self.samples)
        if (
            not self.wanted
            or logits is None
            or targets is None
            or logits.ndim != 2
            or not len(logits) == len(targets) == count
        ):
            return
        if targets.shape != (count,) or targets.is_floating_point():
            return
        shares = logits.float().softmax(-1)
        surest, predictions = shares.max(-1)
        wrong = (predictions != targets) & (targets != IGNORED_LABEL) & surest.isfinite()
        of_targets = shares.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        positions = torch.tensor(self.samples, device=logits.device)
        found = [torch.where(wrong, surest, -1.0), positions, targets, predictions, of_targets]
        rows = torch.cat([self.rows, torch.stack([column.double() for column in found], -1)])
        self.rows = rows[rows[:, 0].topk(MOST).indices]

    def worst(self) -> list[Mistake] | None:
        """The mistakes, the surest first, alike on every rank; a collective where they are wanted, or else ``None``."""
        if not self.wanted:
            return None
        found = torch.cat(of_all_ranks(self.rows)).tolist()
        rows = sorted((row for row in found if row[0] >= 0), key=lambda row: (-row[0], row[1]))
        return [Mistake(int(at), int(target), int(said), p, q) for p, at, target, said, q in rows[:MOST]]


def write_mistakes(
    folder: Path,
    confusion: np.ndarray,
    mistakes: Sequence[Mistake] | None,
    names: Sequence[str],
    split: str,
    describe: Callable[[int], str],
) -> None:
    """Write ``confusion.csv`` and ``confusion.png``, and ``errors.csv``, the mistakes with their files or rows.

    Args:
        folder: where to.
        confusion: counts, shape (classes, classes): row = target, column = prediction.
        mistakes: of the samples of ``split``.
        names: of the classes.
        split: val or test.
        describe: the file or row of a sample of the split.
    """
    names = [escaped(name) for name in names]
    chosen = _most_confused(confusion, MOST_LISTED)
    header = ["true class, predicted as", *(names[k] for k in chosen)]
    rows = [[names[k], *confusion[k, chosen].tolist()] for k in chosen]
    write_atomic(folder / "confusion.csv", _table(header, rows))
    columns = ["split", "position", "sample", "true", "predicted", "probability", "probability_of_true"]
    told = [
        [split, at, escaped(redact(describe(at))), names[target], names[said], f"{p:.6f}", f"{q:.6f}"]
        for at, target, said, p, q in mistakes or ()
    ]
    if mistakes is not None:
        write_atomic(folder / "errors.csv", _table(columns, told))
    drawn = _most_confused(confusion, MOST_DRAWN)
    some = "" if len(drawn) == len(names) else f", {len(drawn)} of {len(names):,} classes: those with the most mistakes"
    title = f"{split}: what each class is taken for{some}"
    plot_confusion(confusion[np.ix_(drawn, drawn)], [names[k] for k in drawn], title, folder / "confusion.png")


def _most_confused(confusion: np.ndarray, most: int) -> np.ndarray:
    """The classes, in order; of more than ``most``, those that most mistakes are of, or for."""
    if len(confusion) <= most:
        return np.arange(len(confusion))
    wrong = confusion.sum(0) + confusion.sum(1) - 2 * confusion.diagonal()
    return np.sort(np.argsort(-wrong, kind="stable")[:most])


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
