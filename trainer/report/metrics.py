"""Losses and accuracy of an evaluation: summed on the device, added up over the ranks, exact however it is cut."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from trainer.values import IGNORED_LABEL, Loss


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found, over all ranks."""

    loss: float  # the sum of losses; NaN when nothing had weight
    losses: dict[str, float]  # mean of each loss over its weighted items
    weights: dict[str, float]  # the weight (samples or tokens) behind each of them
    accuracy: float | None  # share of right predictions, 0 to 1; None when nothing was classified
    samples: int | None  # how many items were classified; None without num_classes
    confusion: np.ndarray | None  # counts, shape (classes, classes): row = target, column = prediction; None as well
    asked: Mapping[str, float] = field(default_factory=dict)  # by run.metrics

    def figures(self) -> dict[str, float]:
        """``loss``, ``accuracy`` if there is one, and what was asked for: for loggers, progress and summary."""
        return {"loss": self.loss} | ({} if self.accuracy is None else {"accuracy": self.accuracy}) | dict(self.asked)


class ClassificationMetrics:
    """Sums the losses and predictions of an evaluation without ever waiting for the device.

    Args:
        num_classes: classes of the confusion matrix; ``None`` for models that do not classify.
        loss_names: known before the first update, as a rank that sees no sample must bring tensors of the same shape to
            the sum over ranks.
    """

    def __init__(
        self, num_classes: int | None, device: torch.device | str, loss_names: Sequence[str] = ("loss",)
    ) -> None:
        self.loss_names, self.num_classes = tuple(loss_names), num_classes
        self._sums = _Sums(len(self.loss_names), num_classes or 0).to(device)

    def update(self, loss: Loss) -> None:
        """Add one loss of one micro-batch; a zero-weight one adds nothing but its zero.

        Logits, where given, have shape ``(..., classes)`` and targets the shape before it. Of a model with several
        losses only one should carry logits, as all of them are counted.
        """
        if loss.name not in self.loss_names:
            raise ValueError(f"loss {loss.name!r} is not one of the model's loss_names {self.loss_names}")
        self._sums.update(self.loss_names.index(loss.name), loss)

    def compute(self) -> EvaluationResult:
        """The result over all ranks, on every rank. Every rank must call it, whether or not it saw a sample."""
        with warnings.catch_warnings():
            # torchmetrics warns of a compute() before any update(): here that is a rank without samples, which is fine.
            warnings.filterwarnings("ignore", message=".*was called before the ``update`` method.*")
            sums, confusion = self._sums.compute()
        totals, weights = sums[:, 0].tolist(), sums[:, 1].tolist()
        means = [total / weight if weight else math.nan for total, weight in zip(totals, weights, strict=True)]
        counts = confusion.cpu().numpy() if self.num_classes else None
        samples = int(counts.sum()) if counts is not None else None
        return EvaluationResult(
            loss=sum(means),
            losses=dict(zip(self.loss_names, means, strict=True)),
            weights=dict(zip(self.loss_names, weights, strict=True)),
            accuracy=float(np.trace(counts)) / samples if counts is not None and samples else None,
            samples=samples,
            confusion=counts,
        )

    def reset(self) -> None:
        self._sums.reset()


class _Sums(Metric):
    """The tensors behind :class:`ClassificationMetrics`; torchmetrics adds them up over the ranks in ``compute``."""

    full_state_update = False
    sums: Tensor  # (losses, 2): total and weight, in float64, as millions of float32 terms would lose digits
    confusion: Tensor  # (classes, classes)

    def __init__(self, losses: int, classes: int) -> None:
        # A rank without new updates would answer from the cache while the others wait for it in the sum over ranks.
        super().__init__(compute_with_cache=False)
        self.classes = classes
        self.add_state("sums", torch.zeros(losses, 2, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("confusion", torch.zeros(classes, classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, index: int, loss: Loss) -> None:
        self.sums[index, 0] += loss.total.detach()
        self.sums[index, 1] += loss.counted()
        if self.classes and loss.logits is not None and loss.targets is not None:
            self._count(loss.logits, loss.targets)

    def _count(self, logits: Tensor, targets: Tensor) -> None:
        # Not torchmetrics' own confusion matrix: its boolean indexing and bincount make the host wait for the device.
        if logits.shape[-1] != self.classes:
            raise ValueError(f"logits of {logits.shape[-1]} classes do not fit num_classes={self.classes}")
        predictions, targets = logits.reshape(-1, self.classes).argmax(-1), targets.reshape(-1)
        counted = targets != IGNORED_LABEL
        cells = torch.where(counted, targets * self.classes + predictions, 0)
        self.confusion.view(-1).index_add_(0, cells, counted.long())

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.sums, self.confusion


def classification_report(confusion: np.ndarray, class_names: Sequence[str] | None = None) -> str:
    """scikit-learn's report (precision, recall, F1 and support of every class) from a confusion matrix."""
    from sklearn.metrics import classification_report as report

    classes = len(confusion)
    names = [str(name) for name in (range(classes) if class_names is None else class_names)]
    if len(names) != classes:  # scikit-learn would only warn, and leave classes out
        raise ValueError(f"{len(names)} class names for {classes} classes")
    targets, predictions = np.indices(confusion.shape).reshape(2, -1)
    counts = confusion.reshape(-1)
    if not counts.any():  # which scikit-learn refuses
        return "no samples were classified\n"
    rows = np.repeat(targets, counts), np.repeat(predictions, counts)
    return report(*rows, labels=range(classes), target_names=names, digits=4, zero_division=0)
