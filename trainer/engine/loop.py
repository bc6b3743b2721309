"""Epochs, steps, evaluation and stop points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from trainer.engine.events import Counters, Listener
from trainer.engine.forward import Forward
from trainer.engine.rehearsal import rehearse
from trainer.engine.step import Stepper, StepResult, why_skipped
from trainer.engine.sync import reshard
from trainer.engine.window import MicroBatch, Window, Windows
from trainer.errors import RunError, listed


class NonFiniteError(RunError):
    """Too many steps in a row had a non-finite loss or gradient."""


def count_steps(windows: Windows, epochs: int, max_steps: int | None) -> int:
    """How many optimizer steps a run takes."""
    total = sum(len(span) * windows.steps(span.start) for span in windows.spans(epochs))
    return total if max_steps is None else min(total, max_steps)


def epoch_at(windows: Windows, epochs: int) -> Callable[[int], int]:
    """A function from a step (from 0, over the whole run) to its epoch; a step past the end is of the last epoch."""
    spans = windows.spans(epochs)
    steps = [windows.steps(span.start) for span in spans]
    begins = list(accumulate((len(span) * each for span, each in zip(spans, steps, strict=True)), initial=0))[:-1]

    def epoch_of(step: int) -> int:
        at = bisect_right(begins, step) - 1
        return min(spans[at].start + (step - begins[at]) // steps[at], epochs - 1)

    return epoch_of


@torch.no_grad()
def evaluate(forward: Forward, micro_batches: Iterable[MicroBatch], metrics: Any) -> Any:
    """Run the model over ``micro_batches`` without gradients and return ``metrics.compute()``.

    Every rank must bring the same number of micro-batches; empty ones are not counted. ``metrics`` are those of the
    report, or something else with ``update(loss)``, ``compute()`` and ``reset()``.
    """
    metrics.reset()
    training = forward.module.training
    forward.module.eval()
    try:
        for micro in micro_batches:
            for loss in forward.losses(micro.batch, micro.packed):
                if not micro.is_empty:
                    metrics.update(loss)
    finally:  # an evaluation that is left must leave what can be saved
        forward.module.train(training)
        reshard(forward.module)
    return metrics.compute()


class Engine:
    """Trains: from windows to counted, announced, evaluated steps."""

    def __init__(
        self,
        stepper: Stepper,
        windows: Windows,
        evaluation: Callable[[], Any] | None = None,  # runs one, and returns its result
        listeners: Sequence[Listener] = (),  # who wants to know, in order
        # Called with an error that ended a step: whether it is mended, so that the step can be taken again.
        recover: Callable[[Exception], bool] = lambda error: False,
        # Called between steps, when the batch of the next one is there: to save, or to stop by an exception.
        at_boundary: Callable[[Engine], None] = lambda engine: None,
        # Whether training ends before its last step, on all ranks alike: asked when the model has been evaluated.
        is_over: Callable[[], bool] = lambda: False,
        # Whether listeners may hear of a step while the next one's forward is under way, where the device allows it.
        overlaps: bool = True,
    ) -> None:
        self.stepper, self.windows, self.evaluation, self.listeners = stepper, windows, evaluation, listeners
        self.is_over, self.overlaps = is_over, overlaps
        self.recover, self.at_boundary, self.counters = recover, at_boundary, Counters()
        self.last_result: Any = None

    @property
    def steps(self) -> int:
        """Steps that were launched: one more than are counted until the last one is settled."""
        return self.counters.step + (self.stepper.launched is not None)

    def settle(self) -> None:
        """Wait for the last step that was launched, so that it is counted and announced."""
        if self.stepper.launched is not None:
            self.stepper.settle()

    def state_dict(self) -> dict[str, Any]:
        """Where training is and what its parts have come to, the same on all ranks, as JSON."""
        return {"counters": asdict(self.counters), **self.stepper.state_dict(), **self.windows.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counters = Counters(**state["counters"])
        self.stepper.load_state_dict(state)
        self.windows.load_state_dict(state)

    def fit(
        self, epochs: int, max_steps: int | None = None, eval_every: int | None = None, max_skipped: int = 20
    ) -> Counters:
        """Train for ``epochs`` or ``max_steps``, whichever ends first; ``last_result`` is then the last evaluation's.
        :class:`NonFiniteError` after ``max_skipped`` skipped steps in a row."""
        counters = self.counters
        total = count_steps(self.windows, epochs, max_steps)
        self.stepper.module.train()
        for listener in self.listeners:
            listener.on_fit_start(counters, total)
        for epoch in range(counters.epoch, epochs):
            counters.epoch = epoch
            while not self._done(lambda: self._rest_of_epoch(total, eval_every, max_skipped)):
                pass
            self._evaluate()
            if counters.step_in_epoch >= self.windows.steps(epoch):  # else max_steps ended it: more steps may follow
                counters.epoch, counters.step_in_epoch = epoch + 1, 0
            if counters.step >= total or self.is_over():
                break
        for listener in self.listeners:
            listener.on_fit_end(counters)
        return counters

    def rehearse(self, epochs: int) -> None:
        """Try the largest micro-batch of ``epochs`` before training, so that memory does not run out hours later."""
        while not self._done(lambda: rehearse(self.stepper, self.windows.longest(epochs))):
            pass  # with smaller micro-batches

    def _done(self, work: Callable[[], None]) -> bool:
        """Whether ``work`` was done; ``False`` when it failed, was mended, and is still to be done."""
        try:
            work()
        except Exception as error:
            self._settle_before(error)
            if not self.recover(error):
                raise
            return False
        return True

    def _settle_before(self, error: Exception) -> None:
        """Count the step before the one that failed. If collectives were aborted that one may have failed, too: then no
        weight has moved, it is not counted, and ``error`` says why."""
        try:
            self.settle()
        except RunError:
            raise
        except Exception as consequence:
            error.__context__ = consequence

    def _rest_of_epoch(self, total: int, eval_every: int | None, max_skipped: int) -> None:
        counters = self.counters
        last = counters.step_in_epoch + total - counters.step
        self._evaluate_if_due(eval_every)  # the run may have been stopped in that evaluation
        if self.is_over():
            return
        for window in self.windows.epoch(counters.epoch, counters.step_in_epoch, last):
            self.at_boundary(self)
            self._step(window, max_skipped)
            self._evaluate_if_due(eval_every)
            if self.is_over():
                break
        self.settle()

    def _step(self, window: Window, max_skipped: int) -> None:
        self.stepper.launch(window, partial(self._count, window, max_skipped))
        if not (self.overlaps and self.stepper.reads_late):
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
        """Evaluate, unless that has just been done: ``eval_every`` and the end of an epoch may fall together."""
        if self.evaluation is not None and self.counters.evaluated_at != self.steps:
            self.settle()
            self.last_result = self.evaluation()
            self.counters.evaluated_at = self.counters.step
            for listener in self.listeners:
                listener.on_evaluation(self.counters, self.last_result)


def _diagnosis(counters: Counters, result: StepResult, window: Window) -> str:
    samples = [index for micro in window if not micro.is_empty for index in micro.indices]
    share = f"; this rank's samples of the step: {listed(samples)}" if samples else ""
    cause = why_skipped(result.grad_norm, result.losses)
    return (
        f"step {counters.step} (epoch {counters.epoch}): {cause}, and {counters.skipped_in_a_row} steps in a row were "
        "skipped; the weights are those of the last finite step. Lower optim.lr, set optim.clip_norm, use "
        f"memory.precision bf16-mixed or 32-true, or look for bad samples{share}"
    )
