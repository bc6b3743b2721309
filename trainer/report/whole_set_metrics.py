"""Metrics of an evaluation that are not sums: computed once, from the predictions of all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.contract import Metric
from trainer.errors import RecipeError, require
from trainer.recipe import HIGHER_IS_BETTER, REGRESSION_METRICS
from trainer.report.metrics import NEEDS_PREDICTIONS, EvaluationMetrics
from trainer.report.progress import warn
from trainer.system.error_reports import describe_error
from trainer.values import IGNORED_LABEL, TASK_METRICS, Loss


def is_higher_better(name: str, custom: Sequence[Metric] = ()) -> bool:
    """Return whether higher values of a metric are better."""
    return name in HIGHER_IS_BETTER or any(metric.name == name and metric.higher_is_better for metric in custom)


class WholeSetMetrics:
    """Computes the metrics in ``wanted`` for each evaluation."""

    def __init__(
        self,
        wanted: Sequence[str | Metric],  # names from the tables of trainer.recipe that fit the task, and custom metrics
        task: str | None,  # a key of ``TASK_METRICS``; ``None`` for a custom model without a task
        num_classes: int | None,  # ``None`` if the model does not classify
        # A collective: this rank's rows (or None) to the rows of all ranks, at least on the first rank.
        gather: Callable[[Tensor | None], Tensor | None] = lambda rows: rows,
        # Calls a function on the first rank, and returns its result or raises its error on all ranks.
        decide: Callable[[Callable[[], dict[str, float]]], dict[str, float]] = lambda compute: compute(),
        bytes_per_token: float | None = None,  # bytes of text per predicted token; ``None`` if unknown
        split: str = "evaluation",
    ) -> None:
        self.task = task or ("single_label" if num_classes else None)
        not_counted = task in ("language", "masked_language", "pairs")  # by ``EvaluationMetrics``
        always = TASK_METRICS[task] if not_counted else ()
        names = [*always, *(metric for metric in wanted if isinstance(metric, str))]
        self.of_loss = {"loss", "perplexity", "bits_per_byte"}.intersection(names)
        self.names = [name for name in dict.fromkeys(names) if name not in self.of_loss]
        self.own = [metric for metric in wanted if isinstance(metric, Metric)]
        if "bits_per_byte" in names and bytes_per_token is None:
            cause = "run.metrics=bits_per_byte needs whole documents (Documents, not streamed), but the data have none"
            raise RecipeError(f"{cause}: remove it, or use perplexity")
        self.gather, self.decide, self.split = gather, decide, split
        self.bytes_per_token = bytes_per_token or math.nan
        self.warned: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Remove all predictions before an evaluation."""
        self.kept: tuple[list[Tensor], list[Tensor]] = [], []  # predictions and targets

    def update(self, loss: Loss) -> None:
        """Copy the predictions of a micro-batch to host memory. This waits for the device."""
        if not (self.names or self.own) or loss.logits is None or loss.targets is None:
            return
        logits, targets = loss.logits.detach(), loss.targets
        if self.task in ("single_label", "token"):
            logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        is_half = logits.dtype in (torch.float16, torch.bfloat16)
        self.kept[0].append((logits.float() if is_half else logits).cpu())
        self.kept[1].append(targets.cpu())

    def compute(self, loss: float) -> dict[str, float]:
        """Compute the metrics of an evaluation with the mean ``loss``, the same on all ranks. A collective."""
        of_loss = {"perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": loss / math.log(2) / self.bytes_per_token}
        found = {name: value for name, value in of_loss.items() if name in self.of_loss}
        if not (self.names or self.own):
            return found
        predictions, targets = (self.gather(torch.cat(rows) if rows else None) for rows in self.kept)
        self.reset()
        return found | self.decide(partial(self._compute_all, predictions, targets))

    def _compute_all(self, predictions: Tensor | None, targets: Tensor | None) -> dict[str, float]:
        if predictions is None or targets is None:
            raise RecipeError(f"run.metrics={[*self.names, *(own.name for own in self.own)][0]} {NEEDS_PREDICTIONS}")
        if not targets.is_floating_point() and targets.ndim == 1:  # one label per item
            there = targets != IGNORED_LABEL
            predictions, targets = predictions[there], targets[there]
        self.left_out: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn and scipy warn about undefined metrics, which are NaN
            compute = partial(self._metric, predictions, targets)
            found = {name: _named(f"run.metrics={name}", partial(compute, name)) for name in self.names}
        if self.left_out and self.left_out != self.warned:  # once, not after every evaluation
            self.warned = self.left_out
            warn(f"{self.split} lacks positive or negative samples of some classes: {'; '.join(self.left_out)}")
        own = {one.name: partial(one.compute, predictions, targets) for one in self.own}
        return found | {name: _named(f"metric {name}", compute) for name, compute in own.items()}

    def _metric(self, predictions: Tensor, targets: Tensor, name: str) -> float:
        from scipy import stats  # imported when needed, because these imports take a second
        from sklearn.metrics import average_precision_score, roc_auc_score

        task: Any = "regression" if name in REGRESSION_METRICS else self.task or "single_label"
        if not len(targets):
            return math.nan
        if task == "pairs":  # predictions are ranks, from 1
            return float(((predictions == 1) if name == "recall_at_1" else 1 / predictions).double().mean())
        if task == "regression":
            predictions, targets = predictions.reshape(len(targets), -1), targets.reshape(len(targets), -1)
        if name in ("pearson", "spearman"):  # NaN for constants and for single samples, an error in scipy
            compute = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]
            pairs = zip(predictions.double().T.numpy(), targets.double().T.numpy(), strict=True)
            return float(np.mean([compute(*pair)[0] for pair in pairs])) if len(targets) > 1 else math.nan
        if name in ("auroc", "average_precision"):
            compute = roc_auc_score if name == "auroc" else average_precision_score
            return self._mean_over_classes(name, compute, task, predictions, targets)
        if name == "top5_accuracy":  # the last class wins among equal logits, as in scikit-learn
            own, places = predictions.gather(1, targets[:, None]), torch.arange(predictions.shape[-1])
            below = (predictions < own) | ((predictions == own) & (places <= targets[:, None]))
            return float(((~below).sum(-1) < 5).double().mean())
        metrics = EvaluationMetrics(predictions.shape[-1], "cpu", task=task)
        metrics.count(predictions, targets)
        found = metrics.values(metrics.counted.numpy())
        require(name in found, f"run.metrics={name} needs exactly two classes: use {name}_macro")
        return found[name]

    def _mean_over_classes(self, name: str, compute: Any, task: str, predictions: Tensor, targets: Tensor) -> float:
        """Return the mean over classes with positive samples and, for AUROC, negative ones; others have no value."""
        if predictions.isnan().any():
            return math.nan
        found = []
        for positive, scores in _columns(task, predictions.clamp(-1e38, 1e38), targets):
            known = positive.any() and not (name == "auroc" and positive.all())
            found.append(compute(positive.numpy(), scores.numpy()) if known else math.nan)
        if unknown := sum(map(math.isnan, found)):
            some = f"the mean of {len(found) - unknown} of {len(found)}"
            self.left_out.append(f"{name} is {some if unknown < len(found) else 'NaN, because no class has a value'}")
        return float(np.nanmean(found))


def _named(what: str, compute: Callable[[], Any]) -> float:
    try:
        return float(compute())
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"{what} cannot be computed ({describe_error(error)}): remove or fix it") from error


def _columns(task: str, logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each class (of two only the second) its true samples, and scores that rank samples by probability p:
    log(p / (1 - p)), because a softmax is 1 from a difference of 37 on, and confident samples would be ties."""
    if task == "multi_label":
        for scores, labels in zip(logits.T, targets.T, strict=True):
            kept = labels != IGNORED_LABEL
            yield labels[kept] > 0.5, scores[kept]
    elif logits.shape[-1] == 2:
        yield targets == 1, logits[:, 1].double() - logits[:, 0].double()
    else:
        # Sorted, so that the sums do not depend on the order of classes.
        rows = (part.double().sort(-1).values for part in logits.split(4096))
        rest = torch.cat([(row[:, :-1] - row[:, -1:]).logsumexp(-1) for row in rows])  # without the largest logit
        largest, total = logits.amax(-1).double(), rest.exp().log1p()
        for number, column in enumerate(logits.T):
            share = column.double() - largest
            others = total + (share - total).exp().neg().log1p()
            yield targets == number, share - torch.where(share == 0, rest, others)
