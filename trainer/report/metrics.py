"""Losses and metrics of an evaluation that are sums: counted on the device, joined over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import RecipeError
from trainer.report.mistakes import Mistake, of_all_ranks
from trainer.values import FIGURES, IGNORED_LABEL, Loss, Task

NEEDS_PREDICTIONS = "needs predictions: give the model's Loss its logits and targets"


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found, over all ranks."""

    loss: float  # the sum of losses; NaN when nothing had weight
    losses: dict[str, float]  # mean of each loss over its weighted items
    weights: dict[str, float]  # the weight (samples or tokens) behind each of them
    accuracy: float | None  # share of right predictions, 0 to 1; None for a model that does not classify
    samples: int | None  # how many items were classified; None without num_classes
    confusion: np.ndarray | None  # counts, shape (classes, classes): row = target, column = prediction; None as well
    others: dict[str, float] = field(default_factory=dict)  # other metrics of the task, and those of run.metrics
    mistakes: Sequence[Mistake] | None = None  # the surest ones; None where samples are not of one class each

    def figures(self) -> dict[str, float]:
        """The values for loggers, progress and summary: loss, metrics of the task, metrics of ``run.metrics``."""
        return {"loss": self.loss} | ({} if self.accuracy is None else {"accuracy": self.accuracy}) | self.others


class ClassificationMetrics:
    """Counts the losses and predictions of an evaluation without waiting for the device.

    Those of torchmetrics do wait (``nonzero``, ``bincount``), and its R2Score subtracts large sums of squares.

    Args:
        num_classes: classes, labels or outputs, by the task; ``None`` for models without logits to compare.
        loss_names: known before the first update: a rank without samples has tensors of the same shape to sum.
        task: what the logits mean.
        wanted: metrics besides those of the task. ``names`` has those of them that the counts give.
    """

    def __init__(
        self,
        num_classes: int | None,
        device: torch.device | str,
        loss_names: Sequence[str] = ("loss",),
        task: Task = "single_label",
        wanted: Sequence[object] = (),
    ) -> None:
        self.loss_names, self.task = tuple(loss_names), task
        self.classes = (num_classes or 0) if task in FIGURES and task != "language" else 0
        # (losses, 3): total, weight and updates with logits, in float64: millions of float32 terms would lose digits
        self.sums = torch.zeros(len(self.loss_names), 3, dtype=torch.float64, device=device)
        # (classes, classes) as the confusion matrix, else a row for each label or output: see _of_labels, _of_numbers
        columns = {"multi_label": 5, "regression": 6}.get(task, self.classes)
        dtype = torch.long if task in ("single_label", "token") else torch.float64
        self.counted = torch.zeros(self.classes, columns, dtype=dtype, device=device)
        known = self.values(np.zeros(self.counted.shape)) if self.classes else {}
        self.names = [str(name) for name in wanted if name in known]

    def update(self, loss: Loss) -> None:
        """Add one loss of one micro-batch; a zero-weight one adds nothing but its zero.

        Logits have the shape ``(..., classes)``, targets the shape before it, or all of it for several labels or
        numbers. Only one of several losses should have logits, as all logits are counted.
        """
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
        elif len(targets):
            true = targets.reshape(logits.shape).double()
            error, first = logits.double() - true, true[0]
            mean = (true - first).mean(0)  # of what the targets exceed the first by: 0 where they are equal
            sums = (torch.ones_like(error), error.abs(), error.square(), (true - first - mean).square())
            self.counted = _joined(self.counted, torch.stack([*(each.sum(0) for each in sums), first, mean], -1))

    def compute(self) -> EvaluationResult:
        """The result over all ranks, on every rank. Every rank must call it, whether or not it saw a sample."""
        totals, weights, given = _over_ranks(self.sums).T.tolist()
        joined = reduce(_joined, of_all_ranks(self.counted)) if self.task == "regression" else _over_ranks(self.counted)
        table = joined.cpu().numpy()
        means = [total / weight if weight else math.nan for total, weight in zip(totals, weights, strict=True)]
        counts = table if self.classes and self.task in ("single_label", "token") else None
        if self.names and not any(given):
            raise RecipeError(f"run.metrics={self.names[0]} {NEEDS_PREDICTIONS}")
        values = self.values(table) if any(given) else {}
        accuracy, names = values.pop("accuracy", None), (*FIGURES.get(self.task, ()), *self.names)
        return EvaluationResult(
            loss=sum(means),
            losses=dict(zip(self.loss_names, means, strict=True)),
            weights=dict(zip(self.loss_names, weights, strict=True)),
            accuracy=accuracy,
            samples=int(counts.sum()) if counts is not None else None,
            confusion=counts,
            others={name: values[name] for name in names if name in values},
        )

    def values(self, table: np.ndarray) -> dict[str, float]:
        """All metrics that counts give, by name; NaN where nothing was counted."""
        compute = {"multi_label": _of_labels, "regression": _of_numbers}.get(self.task, _of_classes)
        found = compute(table if table.any() else np.ones_like(table))
        return {name: float(value) if table.any() else math.nan for name, value in found.items()}

    def reset(self) -> None:
        self.sums.zero_()
        self.counted.zero_()


def _over_ranks(tensor: Tensor) -> Tensor:
    """The sum over the ranks; ``tensor`` stays what this rank has counted."""
    total = tensor.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """The counts of two sets of numbers as those of one, their spread by the rule of Chan et al. (1979)."""
    both = one + other  # means are kept as differences from a target, so that nothing large cancels
    apart = (other[:, 4] - one[:, 4]) + (other[:, 5] - one[:, 5])
    share = other[:, 0] / both[:, 0].clamp(min=1)
    both[:, 3] += apart.square() * one[:, 0] * share
    both[:, 4], both[:, 5] = one[:, 4], one[:, 5] + apart * share
    return torch.where(one[:, :1] > 0, both, other)


def _by_class(right: np.ndarray, said: np.ndarray, true: np.ndarray, occurs: np.ndarray) -> dict[str, float]:
    """F1, precision and recall by scikit-learn's rules: 0 where the divisor is 0, means over the classes that occur."""
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
    """For each label: samples with any label, right ones, said, true, and samples of which each label is right."""
    samples, right, said, true, whole = counted.T
    return _by_class(right, said, true, samples > 0) | {"subset_accuracy": whole[0] / samples[0]}


def _of_numbers(counted: np.ndarray) -> dict[str, float]:
    """For each output: samples, sums of |error|, error² and (target - mean)², a target, the mean minus that target."""
    samples, absolute, squares, spread, *_ = counted.T
    # R² of equal targets is 0, or 1 without an error; of one sample it is NaN.
    lost = np.where(spread > 0, squares / np.where(spread > 0, spread, 1), np.sign(squares))
    mse, r2 = (squares / samples).mean(), np.where(samples > 1, 1 - lost, math.nan).mean()
    return {"mae": (absolute / samples).mean(), "mse": mse, "rmse": np.sqrt(mse), "r2": r2}


def classification_report(confusion: np.ndarray, class_names: Sequence[str] | None = None) -> str:
    """scikit-learn's report (precision, recall, F1 and support of every class) from a confusion matrix."""
    from sklearn.metrics import classification_report as report

    classes = len(confusion)
    names = [str(name) for name in (range(classes) if class_names is None else class_names)]
    if len(names) != classes:  # scikit-learn would only warn, and leave classes out
        raise ValueError(f"{len(names)} class names for {classes} classes")
    if not confusion.any():  # which scikit-learn refuses
        return "no samples were classified\n"
    rows = np.repeat(np.indices(confusion.shape).reshape(2, -1), confusion.reshape(-1), axis=1)
    return report(*rows, labels=range(classes), target_names=names, digits=4, zero_division=0)
