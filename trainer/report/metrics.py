"""Losses and figures of an evaluation: summed on the device, added up over the ranks, exact however it is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.report.mistakes import Mistake
from trainer.values import IGNORED_LABEL, Loss, Task


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation found, over all ranks."""

    loss: float  # the sum of losses; NaN when nothing had weight
    losses: dict[str, float]  # mean of each loss over its weighted items
    weights: dict[str, float]  # the weight (samples or tokens) behind each of them
    accuracy: float | None  # share of right predictions, 0 to 1; None when nothing was classified
    samples: int | None  # how many items were classified; None without num_classes
    confusion: np.ndarray | None  # counts, shape (classes, classes): row = target, column = prediction; None as well
    others: dict[str, float] = field(default_factory=dict)  # the task's figures besides the accuracy, and run.metrics'
    mistakes: Sequence[Mistake] | None = None  # the surest ones; None where samples are not of one class each

    def figures(self) -> dict[str, float]:
        """``loss`` and those of the task, as ``FIGURES`` has them, if there are any, and what ``run.metrics`` asks for:
        what goes to the loggers, the progress and the summary."""
        return {"loss": self.loss} | ({} if self.accuracy is None else {"accuracy": self.accuracy}) | self.others


class ClassificationMetrics:
    """Sums the losses and predictions of an evaluation without ever waiting for the device.

    Args:
        num_classes: classes, labels or outputs, by the task; ``None`` for models without logits to compare.
        loss_names: known before the first update, as a rank that sees no sample must bring tensors of the same shape to
            the sum over ranks.
        task: what the logits say.
    """

    def __init__(
        self,
        num_classes: int | None,
        device: torch.device | str,
        loss_names: Sequence[str] = ("loss",),
        task: Task = "single_label",
    ) -> None:
        self.loss_names, self.num_classes, self.task = tuple(loss_names), num_classes, task
        self._sums = _Sums(len(self.loss_names), num_classes or 0, task, device)

    def update(self, loss: Loss) -> None:
        """Add one loss of one micro-batch; a zero-weight one adds nothing but its zero.

        Logits, where given, have shape ``(..., classes)`` and targets the shape before it, or the whole shape where a
        sample has several labels or numbers. Of a model with several
        losses only one should carry logits, as all of them are counted.
        """
        if loss.name not in self.loss_names:
            raise ValueError(f"loss {loss.name!r} is not one of the model's loss_names {self.loss_names}")
        self._sums.update(self.loss_names.index(loss.name), loss)

    def compute(self) -> EvaluationResult:
        """The result over all ranks, on every rank. Every rank must call it, whether or not it saw a sample."""
        sums, counted = _over_ranks(self._sums.sums), _over_ranks(self._sums.counted)
        totals, weights = sums[:, 0].tolist(), sums[:, 1].tolist()
        means = [total / weight if weight else math.nan for total, weight in zip(totals, weights, strict=True)]
        table = counted.cpu().numpy() if self.num_classes else None
        counts = table if self.task in ("single_label", "token") else None
        samples = int(counts.sum()) if counts is not None else None
        others = _RATIOS[self.task](table) if self.task in _RATIOS and table is not None and table.any() else {}
        return EvaluationResult(
            loss=sum(means),
            losses=dict(zip(self.loss_names, means, strict=True)),
            weights=dict(zip(self.loss_names, weights, strict=True)),
            accuracy=float(np.trace(counts)) / samples if counts is not None and samples else None,
            samples=samples,
            confusion=counts,
            others=others,
        )

    def reset(self) -> None:
        self._sums.reset()


class _Sums:
    """The tensors behind :class:`ClassificationMetrics`.

    Not torchmetrics' own: those of classes make the host wait for the device by boolean indexing and bincount, R2Score
    takes any error below 1e-4 for none, all sum in fp32, and their import takes longer than that of torch.
    """

    def __init__(self, losses: int, classes: int, task: Task, device: torch.device | str) -> None:
        self.classes, self.task = classes, task
        # (losses, 2): total and weight, in float64, as millions of float32 terms would lose digits
        self.sums = torch.zeros(losses, 2, dtype=torch.float64, device=device)
        # (classes, classes) as the confusion matrix, else (labels or outputs, 5) as _RATIOS read it
        of_classes = task in ("single_label", "token")
        shape, dtype = (classes, torch.long) if of_classes else (5, torch.float64)
        self.counted = torch.zeros(classes, shape, dtype=dtype, device=device)

    def update(self, index: int, loss: Loss) -> None:
        self.sums[index, 0] += loss.total.detach()
        self.sums[index, 1] += loss.counted()
        if self.classes and loss.logits is not None and loss.targets is not None:
            self._count(loss.logits, loss.targets)

    def _count(self, logits: Tensor, targets: Tensor) -> None:
        if logits.shape[-1] != self.classes:
            raise ValueError(f"logits of {logits.shape[-1]} classes do not fit num_classes={self.classes}")
        if self.task in ("single_label", "token"):
            predictions, targets = logits.reshape(-1, self.classes).argmax(-1), targets.reshape(-1)
            counted = targets != IGNORED_LABEL
            cells = torch.where(counted, targets * self.classes + predictions, 0)
            self.counted.view(-1).index_add_(0, cells, counted.long())
            return
        one = torch.ones_like(logits, dtype=torch.float64)
        if self.task == "multi_label":
            said, true = (logits > 0).double(), (targets > 0.5).double()
            columns = (one, said * true, said, true, (said == true).all(-1, keepdim=True) * one)
        else:
            true = targets.double()
            error = logits.double() - true
            columns = (one, error.abs(), error.square(), true, true.square())
        self.counted += torch.stack(columns, -1).sum(0)

    def reset(self) -> None:
        self.sums.zero_()
        self.counted.zero_()


def _over_ranks(tensor: Tensor) -> Tensor:
    """The sum over the ranks; ``tensor`` stays what this rank has counted."""
    total = tensor.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return total


def _f1(right: np.ndarray, said: np.ndarray, true: np.ndarray) -> np.ndarray:
    """2 right / (said + true), 0 where there is nothing, as scikit-learn's."""
    return 2 * right / np.maximum(said + true, 1)


def _of_tokens(confusion: np.ndarray) -> dict[str, float]:
    """F1, the mean over the classes that occur."""
    right, said, true = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
    return {"f1_macro": float(_f1(right, said, true)[said + true > 0].mean())}


def _of_labels(counted: np.ndarray) -> dict[str, float]:
    samples, right, said, true, whole = counted.T
    micro, macro = _f1(right.sum(), said.sum(), true.sum()), _f1(right, said, true).mean()
    return {"f1_micro": float(micro), "f1_macro": float(macro), "subset_accuracy": float((whole / samples)[0])}


def _of_numbers(counted: np.ndarray) -> dict[str, float]:
    """Means over the outputs; R² of targets that are all alike is 0, or 1 without an error, as scikit-learn's."""
    samples, absolute, squares, true, true_squares = counted.T
    spread = true_squares - true**2 / samples
    alike = np.where(squares > 0, 0.0, 1.0)
    r2 = np.where(spread > 0, 1 - squares / np.where(spread > 0, spread, 1), alike)
    rmse = float(np.sqrt((squares / samples).mean()))
    return {"mae": float((absolute / samples).mean()), "rmse": rmse, "r2": float(r2.mean())}


_RATIOS = {"token": _of_tokens, "multi_label": _of_labels, "regression": _of_numbers}
"""The figures of a task besides the accuracy, from what was counted: of the confusion matrix; or, for each label, of
samples, right ones, said, true, and samples that are right as a whole; or, for each output, of samples, |error|,
error², target, target²."""


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
