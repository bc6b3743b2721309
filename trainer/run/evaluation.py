"""Evaluations of a run: the metrics of a split over all ranks, and its worst mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple

from trainer.contract import Packable, WholeBatch, capability, splits_of
from trainer.engine.cut import cut_batch, data_parallel_rank
from trainer.engine.data_feed import evaluation_cut, evaluation_micro_batches
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.window import MicroBatch
from trainer.errors import EvaluationInterruptedError
from trainer.report.metrics import EvaluationMetrics, EvaluationResult
from trainer.report.mistakes import TopMistakes
from trainer.report.whole_set_metrics import WholeSetMetrics
from trainer.run.collectives import gather_rows, make_sum, run_on_rank_zero, sum_over_data_parallel
from trainer.run.reference import require_reference
from trainer.run.session import Session, loader_of
from trainer.values import Loss


def make_evaluation(session: Session, forward: Forward, split: str) -> Callable[[], EvaluationResult] | None:
    """Return a function that evaluates on ``split``, each sample once over all ranks; ``None`` without that split."""
    model, fabric, monitor = session.recipe.model, session.fabric, session.monitor
    dataset = splits_of(session.recipe.data).get(split)
    if dataset is None:
        return None
    require_reference(model, dataset)
    loader = loader_of(session, dataset)
    classes, task = model.num_classes, model.task or "single_label"
    asked, per_token = session.recipe.run.requested_metrics(), dataset.bytes_per_token
    metrics = EvaluationMetrics(classes, fabric.device, model.loss_names, task, asked)
    mistakes = TopMistakes(task == "single_label" and classes is not None, fabric.device)
    gather, decide = partial(gather_rows, fabric), partial(run_on_rank_zero, fabric)
    others = [one for one in asked if one not in metrics.names]
    scores = WholeSetMetrics(others, model.task, classes, gather, decide, per_token, split)
    memory, rank = session.recipe.memory, fabric.global_rank
    share, shares = data_parallel_rank(memory, rank, fabric.world_size)
    once = sum_over_data_parallel(memory, rank, make_sum(fabric, fabric.device))

    def micro_batches() -> Iterator[MicroBatch]:
        cut = evaluation_cut(session.plan.initial_cut, len(dataset))  # smaller after a recovery
        size = session.plan.initial_cut.batch_size if isinstance(model, WholeBatch) else len(dataset)
        batches = [range(len(dataset))[start : start + size] for start in range(0, len(dataset), size)]
        packs = capability(model, Packable).packs()
        pieces = [cut_batch(batch, cut, shares, dataset.lengths, packs) for batch in batches]
        ends = {*accumulate(len(one) // shares for one in pieces)}
        own = [*chain(*pieces)], loader, session.quarantine, share, shares, once
        fed = evaluation_micro_batches(split, *own, on_load=partial(monitor.set_activity, "evaluation"))
        for number, micro in enumerate(fed, start=1):
            micro.is_last = number in ends
            micro.is_empty |= rank % memory.tensor_parallel > 0  # another rank counts these samples
            # Check per micro-batch: an evaluation may take longer than a scheduler waits after its signal.
            if any(session.agreement.total([float(session.asked_to_stop() is not None)])):
                raise EvaluationInterruptedError(f"the evaluation of {split} ended early: a rank was asked to stop")
            monitor.batch, mistakes.samples = micro.batch, micro.indices
            yield micro

    def run() -> EvaluationResult:
        with monitor.evaluating():
            return evaluate(forward, micro_batches(), EvaluationAccumulators(metrics, mistakes, scores))

    return run


class EvaluationAccumulators(NamedTuple):
    """The metrics, mistakes and scores of an evaluation, updated together."""

    metrics: EvaluationMetrics
    mistakes: TopMistakes
    scores: WholeSetMetrics

    def reset(self) -> None:
        for part in self:
            part.reset()

    def update(self, loss: Loss) -> None:
        for part in self:
            part.update(loss)

    def compute(self) -> EvaluationResult:
        """Return the result over all ranks. A collective."""
        result = self.metrics.compute()
        others = {**result.custom_metrics, **self.scores.compute(result.loss)}
        return replace(result, custom_metrics=others, mistakes=self.mistakes.worst())
