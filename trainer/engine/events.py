"""What happens during training, announced to progress bars, loggers and monitors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.engine.step import StepResult


@dataclass(slots=True)
class Counters:
    """Where training is. A step counts when its batch is used up, also when its update was skipped."""

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    evaluated_at: int = 0


class Listener:
    """Base class: override what is of interest. Called on every rank; must not run collectives."""

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        """Before the first step, also of a run that is resumed; ``total_steps`` are those of the whole run."""

    def on_step(self, counters: Counters, result: StepResult) -> None:
        """After every optimizer step, of which ``result`` says loss, gradient norm and learning rate."""

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        """After an evaluation; ``result.figures()`` are its figures by name, the same on all ranks."""

    def on_fit_end(self, counters: Counters) -> None:
        """After the last step."""
