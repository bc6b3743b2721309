"""Figures of an evaluation that its sums do not give: computed once, of the predictions of all ranks together."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.contract import Metric
from trainer.errors import RecipeError, require
from trainer.recipe import HIGHER, REGRESSION
from trainer.system.reports import cause
from trainer.values import FIGURES, IGNORED_LABEL, Loss

FROM_SUMS = ("loss", "accuracy", "subset_accuracy", "perplexity", "bits_per_byte")
OF_SCORES = ("auroc", "average_precision", "top5_accuracy")
"""Of the scores of all classes; the others of a classifier are of the class with the largest."""


def is_higher_better(name: str, own: Sequence[Metric] = ()) -> bool:
    """The direction of a figure."""
    return name in HIGHER or any(metric.name == name and metric.higher_is_better for metric in own)


class Scores:
    """The figures that ``wanted`` asks for, of one evaluation after the other.

    Args:
        wanted: names, of the tables of :mod:`trainer.recipe`, which fit the task, and metrics of one's own.
        task: of the model: a key of ``REPORTED``; ``None`` for a model of one's own that does not say so.
        num_classes: of the model; ``None`` for one that does not classify.
        gather: from the rows of this rank (``None`` where it has none) to those of all ranks, on the first one at
            least; a collective.
        decide: what a function returns on the first rank, on all ranks; what it refuses, all refuse alike.
        bytes_per_token: of the texts, for each token that is predicted; ``None`` where the data do not say.
    """

    def __init__(
        self,
        wanted: Sequence[str | Metric],
        task: str | None,
        num_classes: int | None,
        gather: Callable[[Tensor | None], Tensor | None] = lambda rows: rows,
        decide: Callable[[Callable[[], dict[str, float]]], dict[str, float]] = lambda compute: compute(),
        bytes_per_token: float | None = None,
    ) -> None:
        self.task = task or ("single_label" if num_classes else None)
        always = FIGURES["language"] if task == "language" else ()  # of the loss alone: nothing else is kept of logits
        names = [*always, *(metric for metric in wanted if isinstance(metric, str))]
        summed = (*FROM_SUMS, *(FIGURES[self.task] if num_classes else ()))
        self.sums = [name for name in dict.fromkeys(names) if name in summed]
        self.names = [name for name in dict.fromkeys(names) if name not in summed]
        self.own = [metric for metric in wanted if isinstance(metric, Metric)]
        why = "run.metrics=bits_per_byte is of whole documents (Documents, not streamed), and the data are none: "
        require("bits_per_byte" not in names or bytes_per_token is not None, f"{why}leave it out; there is perplexity")
        self.num_classes, self.gather, self.decide = num_classes, gather, decide
        self.bytes_per_token = bytes_per_token or math.nan
        self.keeps_scores = bool(self.own) or not self.classifies or any(name in OF_SCORES for name in self.names)
        self.reset()

    @property
    def classifies(self) -> bool:
        """Whether there is one class an item, so that the largest score says all that most figures need."""
        return self.task in ("single_label", "token")

    def reset(self) -> None:
        """Before an evaluation."""
        self.predictions: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, loss: Loss) -> None:
        """Keep the predictions of a micro-batch in host memory, which waits for the device."""
        if not (self.names or self.own) or loss.logits is None or loss.targets is None:
            return
        logits, targets = loss.logits.detach(), loss.targets
        if self.classifies:
            logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
            if not self.keeps_scores:
                logits = logits.argmax(-1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        self.predictions.append(logits.cpu())
        self.targets.append(targets.cpu())

    def compute(self, loss: float) -> dict[str, float]:
        """The figures of the evaluation whose mean loss is ``loss``, the same on all ranks. A collective."""
        every = {"perplexity": math.exp(min(loss, 700.0))}
        every["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        found = {name: value for name, value in every.items() if name in self.sums}
        if not (self.names or self.own):
            return found
        kept = self.predictions, self.targets
        predictions, targets = (self.gather(torch.cat(rows) if rows else None) for rows in kept)
        self.reset()
        return found | self.decide(partial(self._figures, predictions, targets))

    def _figures(self, predictions: Tensor | None, targets: Tensor | None) -> dict[str, float]:
        asked = [*self.names, *(metric.name for metric in self.own)]
        missing = "give the model's Loss its logits and targets"
        require(predictions is not None and targets is not None, f"run.metrics={asked[0]} needs predictions: {missing}")
        assert predictions is not None
        assert targets is not None
        if not targets.is_floating_point() and targets.ndim == 1:  # an item each
            there = targets != IGNORED_LABEL
            predictions, targets = predictions[there], targets[there]
        found = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchmetrics', of a set in which a class does not occur
            for name in self.names:
                found[name] = _named(f"run.metrics={name}", partial(self._figure, name, predictions, targets))
        for metric in self.own:
            found[metric.name] = _named(f"metric {metric.name}", partial(metric.compute, predictions, targets))
        return found

    def _figure(self, name: str, predictions: Tensor, targets: Tensor) -> float:
        if not len(targets):
            return math.nan
        if name in REGRESSION:
            return _regression(name, predictions, targets)
        if self.task == "multi_label":
            return _multi_label(name, predictions, targets)
        return _classification(name, predictions, targets, self.num_classes or predictions.shape[-1])


def _named(what: str, compute: Callable[[], Any]) -> float:
    """What ``compute`` gives; an error of it says what could not be computed."""
    try:
        return float(compute())
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"{what} cannot be computed ({cause(error)}): leave it out, or mend it") from error


# All by torchmetrics, which takes seconds to import: only when there is something to compute.


def _regression(name: str, predictions: Tensor, targets: Tensor) -> float:
    from torchmetrics.functional import regression as by

    same = predictions.reshape(targets.shape) if predictions.numel() == targets.numel() else predictions
    values, truth = same.double().contiguous(), targets.double()
    compute: Mapping[str, Callable[..., Tensor]] = {
        "mae": by.mean_absolute_error,
        "mse": by.mean_squared_error,
        "rmse": partial(by.mean_squared_error, squared=False),
        "r2": by.r2_score,
        "pearson": by.pearson_corrcoef,
        "spearman": by.spearman_corrcoef,
    }
    return float(compute[name](values, truth).mean())


def _classification(name: str, predictions: Tensor, targets: Tensor, classes: int) -> float:
    from torchmetrics.functional import classification as by

    if name in OF_SCORES:
        if name == "top5_accuracy":
            return float(by.multiclass_accuracy(predictions, targets, classes, average="micro", top_k=min(5, classes)))
        if len(targets.unique()) < 2:  # torchmetrics warns, and gives 0
            return math.nan
        scores = predictions.double().softmax(-1)
        if classes == 2:
            return float(getattr(by, f"binary_{name}")(scores[:, 1], targets))
        return float(getattr(by, f"multiclass_{name}")(scores, targets, classes))
    found = predictions if predictions.ndim == 1 else predictions.argmax(-1)
    if name == "mcc":
        return float(by.multiclass_matthews_corrcoef(found, targets, classes))
    if name == "balanced_accuracy":
        return float(by.multiclass_recall(found, targets, classes, average="macro"))
    figure, _, average = name.partition("_")
    if not average:
        return float(getattr(by, f"binary_{'f1_score' if figure == 'f1' else figure}")(found, targets))
    compute = getattr(by, f"multiclass_{'f1_score' if figure == 'f1' else figure}")
    return float(compute(found, targets, classes, average=average))


def _multi_label(name: str, predictions: Tensor, targets: Tensor) -> float:
    from torchmetrics.functional import classification as by

    figure, average = (name, "macro") if name in OF_SCORES else name.rsplit("_", 1)
    compute = getattr(by, f"multilabel_{'f1_score' if figure == 'f1' else figure}")
    kept = {"average": average, "ignore_index": IGNORED_LABEL}
    return float(compute(predictions.double().sigmoid(), targets.long(), targets.shape[-1], **kept))
