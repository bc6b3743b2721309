"""Selects the best evaluation of a run and decides when training ends early, identically on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.contract import Metric
from trainer.engine.events import Counters, Listener
from trainer.errors import require
from trainer.recipe import Recipe
from trainer.report.whole_set_metrics import is_higher_better

WORST = (-math.inf, -math.inf)


class BestTracker(Listener):
    """The best evaluation of ``split`` so far. All ranks receive the same metrics, so they agree. Raise RecipeError if
    ``run.best`` belongs to a split that is not evaluated; a test set selects only if ``run.best`` names it."""

    def __init__(self, recipe: Recipe, split: str) -> None:
        run = recipe.run
        self.split, self.patience = split, run.patience
        self.own = [metric for metric in run.metrics if isinstance(metric, Metric)]
        chosen, on_test = run.best_metric(), (run.best or "").startswith("test_")
        self.is_chosen = run.evaluate and chosen != "last" and (split == "val" or on_test)
        self.name = chosen if self.is_chosen else None
        """The metric that is compared; ``None`` until the first evaluation if the recipe names none."""
        asked = f"run.patience={run.patience}" if chosen in (None, "last") else f"run.best={run.best}"
        needs_val = split == "test" and (run.patience is not None or chosen not in (None, "last"))
        why = f"{asked} needs a validation set: a test set that chooses the model can no longer measure it"
        fix = f"Hold out a part of the training set (data.val_fraction 0.1), or set run.best test_{chosen or 'loss'}"
        require(self.is_chosen or not needs_val, f"{why}. {fix}")
        require(needs_val or not on_test, f"{asked}, but there is a validation set: set run.best {chosen}")
        self.score, self.step, self.since = WORST, 0, 0
        self.result: Any = None
        """The result of the best evaluation, if this process made it."""
        self.last: float | None = None  # the metric of the newest evaluation, also of one before a resume

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        """Compare with the best so far; a value that is not finite is never better. An equal metric with an equal or a
        lower loss becomes the best, too: a metric such as accuracy stays at 100 % while the model still improves. Only
        a better metric counts for ``run.patience``."""
        if not self.is_chosen:
            return
        metrics = result.metrics()
        score = self.score_of(metrics)
        choices = ", ".join(metrics)
        require(self.name in metrics, f"run.best={self.name} is not a metric of this model: use one of {choices}")
        self.since = 0 if score[0] > self.score[0] else self.since + 1
        self.last = metrics[str(self.name)]
        if score != WORST and score >= self.score:
            self.score, self.step, self.result = score, counters.step, result

    def score_of(self, metrics: Mapping[str, float]) -> tuple[float, float]:
        """Return the score of an evaluation: its metric and, for ties, its loss, negated if lower is better. Return
        ``WORST`` if one of them is not finite, because NaN logits still have an accuracy. The default metric is
        accuracy, as in timm: the loss of an overconfident classifier rises while it still learns."""
        name = self.name or ("accuracy" if "accuracy" in metrics else "loss")
        if self.is_chosen:
            self.name = name
        value, loss = metrics.get(name, math.nan), metrics.get("loss", math.nan)
        if not math.isfinite(value) or not math.isfinite(loss):
            return WORST
        return (value if is_higher_better(name, self.own) else -value), -loss

    @property
    def metric_column(self) -> str:
        """The metric with its split, such as ``val_loss``."""
        return f"{self.split}_{self.name}"

    @property
    def best_value(self) -> float:
        return self.score[0] if is_higher_better(str(self.name), self.own) else -self.score[0]

    def is_over(self) -> bool:
        """Return whether ``run.patience`` evaluations in a row were not better than the best."""
        return self.patience is not None and self.since >= self.patience

    def state_dict(self) -> dict[str, Any]:
        metric, score = (self.metric_column, self.score[0]) if self.step else ("", 0.0)
        state = {"figure": metric, "score": score, "step": self.step, "since": self.since}
        state |= {"loss": -self.score[1]} if self.step else {}  # not required of older checkpoints, like "last"
        return state | ({"last": self.last} if self.last is not None and math.isfinite(self.last) else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best evaluation so far. A value saved for another metric or split is ignored."""
        split, _, name = state["figure"].partition("_")
        if self.is_chosen and state["step"] and split == self.split and self.name in (None, name):
            loss = float(state.get("loss", math.inf))  # older checkpoints have neither "loss" nor "last"
            self.name, self.score, self.step = name, (float(state["score"]), -loss), state["step"]
            self.last = state.get("last")
        if self.is_chosen and (self.step or not state["step"]):
            self.since = state["since"]
