"""Which step's weights are the run's model, and when training ends early: by its evaluations, on all ranks alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.contract import Metric
from trainer.engine.events import Counters, Listener
from trainer.errors import require
from trainer.recipe import Recipe
from trainer.report.scores import is_higher_better


class Best(Listener):
    """The best evaluation so far. All ranks hear of the same figures, so all know the same.

    Args:
        recipe: with ``run.best`` and ``run.patience``.
        split: what is evaluated while the run trains, val or test.

    Raises:
        RecipeError: for a figure of a set that is not evaluated; a test set chooses only where it is named.
    """

    def __init__(self, recipe: Recipe, split: str) -> None:
        run = recipe.run
        self.split, self.patience = split, run.patience
        self.own = [metric for metric in run.metrics if isinstance(metric, Metric)]
        chosen, on_test = run.best_metric(), (run.best or "").startswith("test_")
        self.is_chosen = run.evaluate and chosen != "last" and (split == "val" or on_test)
        self.name = chosen if self.is_chosen else None
        """The figure that is compared; ``None`` until the first evaluation where the recipe names none."""
        asked = f"run.patience={run.patience}" if chosen in (None, "last") else f"run.best={run.best}"
        held = "hold out a part of the training set (data.val_fraction 0.1, say)"
        if split == "test" and (run.patience is not None or chosen not in (None, "last")):
            name = chosen or "loss"
            why = f"{asked}: there is no validation set, and what a test set has chosen says too much of itself: {held}"
            require(self.is_chosen, f"{why}, or say run.best test_{name}")
        elif on_test:
            require(False, f"{asked}: there is a validation set: choose by run.best {chosen}")
        self.score, self.step, self.since = -math.inf, 0, 0
        self.result: Any = None
        """Of the best evaluation, if this process has made it."""
        self.last: float | None = None  # the metric of the newest evaluation, also of one before a resume

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        """Compare; a figure that is not finite is never better."""
        if not self.is_chosen:
            return
        figures = result.figures()
        score = self.score_of(figures)
        require(
            self.name in figures, f"run.best={self.name} is no figure of this model: choose of {', '.join(figures)}"
        )
        self.since, self.last = self.since + 1, figures[str(self.name)]
        if score > self.score:
            self.score, self.step, self.since, self.result = score, counters.step, 0, result

    def score_of(self, figures: Mapping[str, float]) -> float:
        """By which evaluations are compared, higher is better; minus infinity where it or the loss is not finite, as
        logits that are NaN have an accuracy, too, that of class 0.

        Where the recipe names no figure it is the accuracy, as in timm: an overconfident classifier's loss rises while
        it still learns, so the least loss can be that of hardly any training.
        """
        name = self.name or ("accuracy" if "accuracy" in figures else "loss")
        if self.is_chosen:
            self.name = name
        value = figures.get(name, math.nan)
        if not math.isfinite(value) or not math.isfinite(figures.get("loss", math.nan)):
            return -math.inf
        return value if is_higher_better(name, self.own) else -value

    @property
    def column(self) -> str:
        """The figure, with its split."""
        return f"{self.split}_{self.name}"

    @property
    def figure(self) -> float:
        """Its best value."""
        return self.score if is_higher_better(str(self.name), self.own) else -self.score

    def is_over(self) -> bool:
        """Whether ``run.patience`` has come to its end."""
        return self.patience is not None and self.since >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        score = self.score if math.isfinite(self.score) else 0.0
        last = self.last if self.last is not None and math.isfinite(self.last) else None
        state = {"figure": self.column if self.step else "", "score": score, "step": self.step, "since": self.since}
        return state | ({} if last is None else {"last": last})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was best before; of another figure there is nothing to take."""
        split, _, name = state["figure"].partition("_")
        if self.is_chosen and state["step"] and split == self.split and self.name in (None, name):
            self.name, self.score, self.step = name, float(state["score"]), state["step"]
            self.last = state.get("last")  # older checkpoints have none
        if self.is_chosen and (self.step or not state["step"]):
            self.since = state["since"]
