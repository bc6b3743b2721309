"""The training loop: epochs, steps, evaluation and the ends of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from trainer.engine.events import Counters, Listener
from trainer.engine.forward import Forward
from trainer.engine.memory_rehearsal import longest_window, rehearse
from trainer.engine.step import Stepper, StepResult, skip_reason
from trainer.engine.sync import reshard
from trainer.engine.two_pass import evaluated_losses
from trainer.engine.window import MicroBatch, Window, Windows
from trainer.errors import RunError, format_list


class NonFiniteError(RunError):
    """Too many consecutive steps had a non-finite loss or gradient."""


def count_steps(windows: Windows, epochs: int, max_steps: int | None) -> int:
    total = sum(len(span) * windows.steps(span.start) for span in windows.epoch_ranges(epochs))
    return total if max_steps is None else min(total, max_steps)


def epoch_at(windows: Windows, epochs: int, step: int) -> int:
    """Return the epoch of a ``step`` of the run (from 0); the last epoch for steps after the end."""
    for span in windows.epoch_ranges(epochs):
        steps_per_epoch = windows.steps(span.start)
        if step < len(span) * steps_per_epoch:
            return span.start + step // steps_per_epoch
        step -= len(span) * steps_per_epoch
    return epochs - 1


@torch.no_grad()
def evaluate(forward: Forward, micro_batches: Iterable[MicroBatch], metrics: Any) -> Any:
    """Run the model over ``micro_batches`` without gradients and return ``metrics.compute()``.

    Every rank must supply the same number of micro-batches; empty ones are not counted.
    """
    metrics.reset()
    training = forward.module.training
    forward.module.eval()
    try:
        for loss in evaluated_losses(forward, micro_batches):
            metrics.update(loss)
    finally:  # also after a stop, so that the state can be saved
        forward.module.train(training)
        reshard(forward.module)
    return metrics.compute()


class Engine:
    """Runs the training loop: takes steps on windows, counts them, calls listeners, evaluates."""

    def __init__(
        self,
        stepper: Stepper,
        windows: Windows,
        evaluation: Callable[[], Any] | None = None,  # runs an evaluation and returns its result
        listeners: Sequence[Listener] = (),  # called in this order
        # Called with the error that ended a step; returns whether the step can be retried.
        recover: Callable[[Exception], bool] = lambda error: False,
        # Called between steps, after the next batch is read; saves, or raises an exception to stop.
        at_boundary: Callable[[Engine], None] = lambda engine: None,
        # Returns, after an evaluation, whether training ends early; all ranks must return the same.
        is_over: Callable[[], bool] = lambda: False,
        # Whether listeners may be called during the next step's forward, on devices that allow it.
        overlaps: bool = True,
    ) -> None:
        self.stepper, self.windows, self.evaluation, self.listeners = stepper, windows, evaluation, listeners
        self.is_over, self.overlaps = is_over, overlaps
        self.recover, self.at_boundary, self.counters = recover, at_boundary, Counters()
        self.last_result: Any = None

    @property
    def steps(self) -> int:
        """The number of launched steps, which includes one that is not settled and counted yet."""
        return self.counters.step + (self.stepper.launched is not None)

    def settle(self) -> None:
        """Wait for the last launched step, so that it is counted and listeners are called."""
        if self.stepper.launched is not None:
            self.stepper.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training and the state of stepper and windows, as JSON, equal on all ranks."""
        return {"counters": asdict(self.counters), **self.stepper.state_dict(), **self.windows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counters = Counters(**state["counters"])
        self.stepper.load_state_dict(state)
        self.windows.load_state_dict(state)

    def fit(
        self, epochs: int, max_steps: int | None = None, eval_every: int | None = None, max_skipped: int = 20
    ) -> Counters:
        """Train for ``epochs`` or ``max_steps``, whichever ends first; ``last_result`` is then the last evaluation."""
        counters = self.counters
        total = count_steps(self.windows, epochs, max_steps)
        self.stepper.module.train()
        for listener in self.listeners:
            listener.on_fit_start(counters, total)
        for epoch in range(counters.epoch, epochs):
            counters.epoch = epoch
            self._retry(partial(self._rest_of_epoch, total, eval_every, max_skipped))
            self._evaluate()
            if counters.step_in_epoch >= self.windows.steps(epoch):  # otherwise max_steps ended the epoch
                counters.epoch, counters.step_in_epoch = epoch + 1, 0
            if counters.step >= total or self.is_over():
                break
        for listener in self.listeners:
            listener.on_fit_end(counters)
        return counters

    def rehearse(self, epochs: int) -> None:
        """Try the largest micro-batch of ``epochs`` before training, so that memory does not run out hours later."""
        self._retry(lambda: rehearse(self.stepper, longest_window(self.windows, epochs)))

    def _retry(self, work: Callable[[], None]) -> None:
        while True:
            try:
                return work()
            except Exception as error:  # noqa: PERF203
                if not self._recovered(error):
                    raise

    def _recovered(self, error: Exception) -> bool:
        """Count the step before the failed one, and return whether the failed one can be retried.

        If collectives were aborted, the step before may have failed too. Then it moved no weight and is not counted.
        """
        try:
            self.settle()
        except RunError:
            raise
        except Exception as consequence:
            error.__context__ = consequence
        return self.recover(error)

    def _rest_of_epoch(self, total: int, eval_every: int | None, max_skipped: int) -> None:
        counters = self.counters
        last = counters.step_in_epoch + total - counters.step
        self._evaluate_if_due(eval_every)  # a resumed run may have been stopped in this evaluation
        if self.is_over():
            return
        for window in self.windows.epoch(counters.epoch, counters.step_in_epoch, last):
            self.at_boundary(self)
            self.stepper.launch(window, partial(self._count, window, max_skipped))
            if not (self.overlaps and self.stepper.reads_late):
                self.settle()
            self._evaluate_if_due(eval_every)
            if self.is_over():
                break
        self.settle()

    def _count(self, window: Window, max_skipped: int, result: StepResult) -> None:
        counters = self.counters
        counters.step += 1
        counters.step_in_epoch += 1
        counters.skipped_steps += result.skipped
        counters.skipped_in_a_row = counters.skipped_in_a_row + 1 if result.skipped else 0
        for listener in self.listeners:
            listener.on_step(counters, result)
        if counters.skipped_in_a_row >= max_skipped:
            raise NonFiniteError(_diagnosis(counters, result, window))

    def _evaluate_if_due(self, eval_every: int | None) -> None:
        if eval_every and self.steps % eval_every == 0:
            self._evaluate()

    def _evaluate(self) -> None:
        """Evaluate, unless this step has been evaluated: ``eval_every`` and the end of an epoch may coincide."""
        if self.evaluation is not None and self.counters.evaluated_at != self.steps:
            self.settle()
            self.last_result = self.evaluation()
            self.counters.evaluated_at = self.counters.step
            for listener in self.listeners:
                listener.on_evaluation(self.counters, self.last_result)


def _diagnosis(counters: Counters, result: StepResult, window: Window) -> str:
    samples = [index for micro in window if not micro.is_empty for index in micro.indices]
    share = f"; this rank's samples of the step: {format_list(samples)}" if samples else ""
    cause = skip_reason(result.grad_norm, result.losses)
    return (
        f"step {counters.step} (epoch {counters.epoch}): {cause}, and {counters.skipped_in_a_row} steps in a row were "
        "skipped; the weights are those of the last finite step. Lower optim.lr, set optim.clip_norm, use "
        f"memory.precision bf16-mixed or 32-true, or look for bad samples{share}"
    )
