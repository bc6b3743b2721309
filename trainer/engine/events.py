"""Events of training, for progress bars, loggers and monitors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.engine.step import StepResult


@dataclass(slots=True)
class Counters:
    """The position in training. A step whose update was skipped counts too, because its batch is used up."""

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    evaluated_at: int = 0


class Listener:
    """Base class of listeners: override any method. Called on every rank; must not run collectives."""

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        """Called before the first step of a new or resumed run; ``total_steps`` counts the whole run."""

    def on_step(self, counters: Counters, result: StepResult) -> None:
        """Called after every optimizer step; ``result`` has its loss, gradient norm and learning rate."""

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        """Called after an evaluation; ``result.metrics()`` has its metrics by name, equal on all ranks."""

    def on_fit_end(self, counters: Counters) -> None:
        """Called after the last step."""
