"""Losses and metrics of an evaluation that are computed from sums: counted on the device, then summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import require
from trainer.report.mistakes import Mistake, of_all_ranks
from trainer.values import IGNORED_LABEL, TASK_METRICS, TASKS_WITHOUT_CLASSES, Loss, Task

NEEDS_PREDICTIONS = "needs predictions: set logits and targets in the model's Loss"


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation over all ranks."""

    loss: float  # sum of the mean losses; NaN if nothing had weight
    losses: dict[str, float]  # mean of each loss over its weighted items
    weights: dict[str, float]  # total weight (samples or tokens) of each loss
    accuracy: float | None  # share of correct predictions, 0 to 1; None for a model that does not classify
    samples: int | None  # number of classified items; None without num_classes
    confusion: np.ndarray | None  # counts, shape (classes, classes): row = target, column = prediction; or None
    custom_metrics: dict[str, float] = field(default_factory=dict)  # other metrics, and those of run.metrics
    mistakes: Sequence[Mistake] | None = None  # the most confident ones; None if samples do not have one class each

    def metrics(self) -> dict[str, float]:
        """Return the metrics for loggers, progress and summary: loss, those of the task, and of ``run.metrics``."""
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {"loss": self.loss, **accuracy, **self.custom_metrics}


class EvaluationMetrics:
    """Counts the losses and predictions of an evaluation without waiting for the device, as metrics of torchmetrics do
    (``nonzero``, ``bincount``). Its R2Score also subtracts large sums of squares."""

    def __init__(
        self,
        num_classes: int | None,  # number of classes, labels or outputs, by task; ``None`` without logits to compare
        device: torch.device | str,
        loss_names: Sequence[str] = ("loss",),  # so that ranks without samples have tensors of the same shape
        task: Task = "single_label",  # defines the meaning of the logits
        wanted: Sequence[object] = (),  # further metrics; ``names`` lists those that can be computed from counts
    ) -> None:
        self.loss_names, self.task = tuple(loss_names), task
        counts_classes = task in TASK_METRICS and task not in TASKS_WITHOUT_CLASSES
        self.classes = 2 if task == "preference" else (num_classes or 0) if counts_classes else 0
        # (losses, 3): total, weight and number of updates with logits; float64 for millions of float32 terms
        self.sums = torch.zeros(len(self.loss_names), 3, dtype=torch.float64, device=device)
        # (classes, classes) for a confusion matrix, otherwise a row per label or output: see _of_labels, _of_numbers
        columns = {"multi_label": 5, "regression": 6, "preference": 3}.get(task, self.classes)
        dtype = torch.long if task in ("single_label", "token") else torch.float64
        self.counted = torch.zeros(self.classes, columns, dtype=dtype, device=device)
        known = self.values(np.zeros(self.counted.shape)) if self.classes else {}
        self.names = [str(name) for name in wanted if name in known]

    def update(self, loss: Loss) -> None:
        """Add one loss of one micro-batch; at most one of several losses should have logits, because all are counted.
        Their shape is ``(..., classes)``; targets have the same for labels or numbers, otherwise ``(...)``."""
        if loss.name not in self.loss_names:
            raise ValueError(f"loss {loss.name!r} is not one of the model's loss_names {self.loss_names}")
        sums = self.sums[self.loss_names.index(loss.name)]
        sums[0] += loss.total.detach()
        sums[1] += loss.counted()
        if self.classes and loss.logits is not None and loss.targets is not None:
            sums[2] += 1
            self.count(loss.logits, loss.targets)

    def count(self, logits: Tensor, targets: Tensor) -> None:
        if logits.shape[-1] != self.classes:
            raise ValueError(f"logits of {logits.shape[-1]} classes do not fit num_classes={self.classes}")
        logits = logits.reshape(-1, self.classes)
        if self.task in ("single_label", "token"):
            predictions, targets = logits.argmax(-1), targets.reshape(-1)
            counted = targets != IGNORED_LABEL
            cells = torch.where(counted, targets * self.classes + predictions, 0)
            self.counted.view(-1).index_add_(0, cells, counted.long())
        elif self.task == "multi_label":
            targets = targets.reshape(logits.shape)
            kept = targets != IGNORED_LABEL
            said, true = kept & (logits > 0), kept & (targets > 0.5)
            samples, whole = kept.any(-1, keepdim=True), (said == true).all(-1, keepdim=True)
            columns = (samples.expand_as(kept), said & true, said, true, (samples & whole).expand_as(kept))
            self.counted += torch.stack([column.double() for column in columns], -1).sum(0)
        elif self.task == "preference":  # a row for the chosen answers, and one for the rejected
            larger = logits > logits.flip(1)
            self.counted += torch.stack([torch.ones_like(logits), larger, logits], -1).sum(0, dtype=torch.float64)
        elif len(targets):
            true = targets.reshape(logits.shape).double()
            error, first = logits.double() - true, true[0]
            mean = (true - first).mean(0)  # mean difference to the first target: exactly 0 for equal targets
            sums = (torch.ones_like(error), error.abs(), error.square(), (true - first - mean).square())
            self.counted = _joined(self.counted, torch.stack([*(each.sum(0) for each in sums), first, mean], -1))

    def compute(self) -> EvaluationResult:
        """Return the result over all ranks. Every rank must call it, even if it saw no sample."""
        totals, weights, given = _over_ranks(self.sums).T.tolist()
        joined = reduce(_joined, of_all_ranks(self.counted)) if self.task == "regression" else _over_ranks(self.counted)
        table = joined.cpu().numpy()
        means = [total / weight if weight else math.nan for total, weight in zip(totals, weights, strict=True)]
        counts = table if self.classes and self.task in ("single_label", "token") else None
        require(any(given) or not self.names, f"run.metrics={', '.join(self.names[:1])} {NEEDS_PREDICTIONS}")
        values = self.values(table) if any(given) else {}
        accuracy, names = values.pop("accuracy", None), (*TASK_METRICS.get(self.task, ()), *self.names)
        return EvaluationResult(
            loss=sum(means),
            losses=dict(zip(self.loss_names, means, strict=True)),
            weights=dict(zip(self.loss_names, weights, strict=True)),
            accuracy=accuracy,
            samples=int(counts.sum()) if counts is not None else None,
            confusion=counts,
            custom_metrics={name: values[name] for name in names if name in values},
        )

    def values(self, table: np.ndarray) -> dict[str, float]:
        """Compute all metrics of the counts ``table``, by name; NaN if nothing was counted."""
        others = {"multi_label": _of_labels, "regression": _of_numbers, "preference": _of_pairs}
        compute = others.get(self.task, _of_classes)
        found = compute(table if table.any() else np.ones_like(table))
        return {name: float(value) if table.any() else math.nan for name, value in found.items()}

    def reset(self) -> None:
        self.sums.zero_()
        self.counted.zero_()


def _over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """Combine the counts of two sets of numbers, with the spread by the rule of Chan et al. (1979)."""
    both = one + other  # means are stored as differences to a target, to avoid cancellation
    apart = (other[:, 4] - one[:, 4]) + (other[:, 5] - one[:, 5])
    share = other[:, 0] / both[:, 0].clamp(min=1)
    both[:, 3] += apart.square() * one[:, 0] * share
    both[:, 4], both[:, 5] = one[:, 4], one[:, 5] + apart * share
    return torch.where(one[:, :1] > 0, both, other)


def _by_class(right: np.ndarray, said: np.ndarray, true: np.ndarray, occurs: np.ndarray) -> dict[str, float]:
    """Compute F1, precision and recall as scikit-learn does: 0 if the divisor is 0, means over classes that occur."""
    found: dict[str, float] = {}
    for name, divisor in {"f1": (said + true) / 2, "precision": said, "recall": true}.items():
        each = right / np.where(divisor > 0, divisor, 1)
        found |= {f"{name}_macro": each[occurs].mean(), f"{name}_micro": right.sum() / (divisor.sum() or 1)}
        found |= {f"{name}_weighted": each @ true / (true.sum() or 1)} | ({name: each[1]} if len(each) == 2 else {})
    return found


def _of_classes(confusion: np.ndarray) -> dict[str, float]:
    right, said, true, items = confusion.diagonal(), confusion.sum(0), confusion.sum(1), confusion.sum()
    divisor = np.sqrt(items**2 - said @ said) * np.sqrt(items**2 - true @ true)
    return _by_class(right, said, true, said + true > 0) | {
        "accuracy": right.sum() / items,
        "balanced_accuracy": (right[true > 0] / true[true > 0]).mean(),
        "mcc": (right.sum() * items - said @ true) / divisor if divisor else 0.0,
    }


def _of_labels(counted: np.ndarray) -> dict[str, float]:
    """Columns per label: samples with any label, true positives, predicted, true, samples with all labels correct."""
    samples, right, said, true, whole = counted.T
    return _by_class(right, said, true, samples > 0) | {"subset_accuracy": whole[0] / samples[0]}


def _of_numbers(counted: np.ndarray) -> dict[str, float]:
    """Columns per output: samples, sums of |error|, error² and (target - mean)², one target, and the mean minus it."""
    samples, absolute, squares, spread, *_ = counted.T
    # R² is 0 for equal targets, 1 without an error, and NaN for a single sample.
    lost = np.where(spread > 0, squares / np.where(spread > 0, spread, 1), np.sign(squares))
    mse, r2 = (squares / samples).mean(), np.where(samples > 1, 1 - lost, math.nan).mean()
    return {"mae": (absolute / samples).mean(), "mse": mse, "rmse": np.sqrt(mse), "r2": r2}


def _of_pairs(counted: np.ndarray) -> dict[str, float]:
    """Columns per answer of a pair: pairs, pairs in which it has the larger reward, sum of its rewards."""
    (pairs, right, chosen), (_, _, rejected) = counted
    return {"reward_accuracy": right / pairs, "reward_margin": (chosen - rejected) / pairs}


def classification_report(confusion: np.ndarray, class_names: Sequence[str] | None = None) -> str:
    """Return scikit-learn's report (precision, recall, F1 and support of every class) for a confusion matrix."""
    from sklearn.metrics import classification_report as report

    names = [str(name) for name in (range(len(confusion)) if class_names is None else class_names)]
    if len(names) != len(confusion):  # scikit-learn would only warn, and omit classes
        raise ValueError(f"{len(names)} class names for {len(confusion)} classes")
    if not confusion.any():  # an error in scikit-learn
        return "no samples were classified\n"
    rows = np.repeat(np.indices(confusion.shape).reshape(2, -1), confusion.reshape(-1), axis=1)
    return report(*rows, labels=range(len(names)), target_names=names, digits=4, zero_division=0)
