"""A launched recipe with its prepared data: its loaders, its evaluations and its watchdog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fabric import Fabric

from trainer.contract import Packable, capability, splits_of
from trainer.data.loader import Loader, make_loader
from trainer.data.workers import decide_workers
from trainer.engine.cut import Cut, cut_batch, data_parallel_rank
from trainer.engine.data_feed import evaluation_cut, evaluation_micro_batches, make_windows
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.engine.window import MicroBatch, Windows
from trainer.errors import EvaluationInterruptedError, RunError, RunStoppedError
from trainer.faults.signals import StopSignals, end_startup_watch
from trainer.faults.watchdog import PeerError, Watchdog
from trainer.launching.world import World
from trainer.memory.monitor import MemoryMonitor
from trainer.memory.oom import OutOfMemoryError, describe_oom, is_out_of_memory, sample_lengths, shapes_of
from trainer.memory.plan import Plan
from trainer.recipe import Recipe
from trainer.report.metrics import EvaluationMetrics, EvaluationResult
from trainer.report.mistakes import TopMistakes
from trainer.report.whole_set_metrics import WholeSetMetrics
from trainer.run.collectives import (
    VotedSum,
    gather_rows,
    make_host_sum,
    make_sum,
    run_on_rank_zero,
    sum_over_data_parallel,
)
from trainer.run.listeners import report_bad_samples
from trainer.run.run_prediction import RunPrediction
from trainer.values import Loss


class Session:
    """A recipe whose processes are launched and whose data is prepared, with the watchdog of this rank. All ranks
    create it together, before the model. Later, only :meth:`set_cut` and :meth:`watched` change it."""

    def __init__(
        self, recipe: Recipe, plan: Plan, fabric: Fabric, world: World, forecast: RunPrediction | None = None
    ) -> None:
        self.recipe, self.plan, self.fabric, self.world, self.forecast = recipe, plan, fabric, world, forecast
        self.monitor, self.agreement = MemoryMonitor(fabric.device), VotedSum(make_host_sum(fabric))

        def report(quarantine: Quarantine, new: list[BadSampleAt]) -> None:  # not a method, to avoid a reference cycle
            if fabric.global_rank == 0:
                report_bad_samples(quarantine, new, recipe.run.dir)

        self.quarantine = Quarantine(recipe.data.max_bad_samples, report)
        self.watchdog: Watchdog | None = None
        self.signals: StopSignals | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which prints and writes."""
        return self.fabric.global_rank == 0

    @property
    def run_dir(self) -> Path:
        """The run directory of a training run."""
        return Path(str(self.recipe.run.dir))

    def set_cut(self, cut: Cut) -> None:
        """Set the cut of all later batches."""
        self.plan = replace(self.plan, initial_cut=cut)

    def asked_to_stop(self) -> str | None:
        """Return the name of the signal that asked this process to stop, if any."""
        return self.signals.received if self.signals is not None else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the watchdog of this rank and record signals that ask to stop.

        An exception is reported with rank, step, phase and samples, and announced to the other ranks. If a collective
        failed because another rank ended, the exception becomes a :class:`PeerError` with the reason of that rank.
        Contexts can be nested: the inner one announces an error before the outer one cleans up.

        Raises:
            OutOfMemoryError: for any out of memory, with its place and settings to try.
        """
        if self.watchdog is not None:
            with self._explained(self.watchdog):
                yield
            return
        fabric = self.fabric
        watchdog = Watchdog(self.monitor, fabric.global_rank, fabric.world_size, self.recipe.run.hang_after)
        end_startup_watch()
        try:
            with StopSignals(self.is_first, lambda: watchdog.heard is not None) as signals:
                self.watchdog, self.signals = watchdog, signals
                with self._explained(watchdog):
                    yield
        finally:
            watchdog.close()
            self.watchdog = None

    @contextmanager
    def _explained(self, watchdog: Watchdog) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            raw = not isinstance(error, RunError) and is_out_of_memory(error)  # a RunError may only quote one
            explained = watchdog.root_error(self._out_of_memory(error) if raw else error)
            if self.signals is not None and isinstance(explained, RunStoppedError | PeerError):
                self.signals.leaving = True
            if explained is error:
                raise
            raise explained from error

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        monitor, batch = self.monitor, self.monitor.batch
        place = monitor.phase, self.fabric.global_rank, self.plan, sample_lengths(batch)
        shapes = shapes_of(batch)
        return OutOfMemoryError(describe_oom(error, *place, shapes=shapes, recipe=self.recipe, on_gpu=monitor.on_gpu))


def _loader(session: Session, split: Any) -> Loader:
    recipe, world = session.recipe, session.world
    workers = decide_workers(recipe.data, world.accelerator, world.devices)
    return make_loader(recipe, split, workers, pin_memory=session.fabric.device.type == "cuda")


def training_windows(session: Session) -> Windows:
    """Return this rank's share of the training batches."""
    recipe, ranks = session.recipe, (session.fabric.global_rank, session.fabric.world_size)
    loader = _loader(session, recipe.data.train)
    once = sum_over_data_parallel(recipe.memory, ranks[0], session.agreement)
    windows = make_windows(recipe, loader, *ranks, once, quarantine=session.quarantine)
    return replace(windows, on_epoch=partial(setattr, loader, "at_once"))


def make_evaluation(session: Session, forward: Forward, split: str) -> Callable[[], EvaluationResult] | None:
    """Return a function that evaluates on ``split``, each sample once over all ranks; ``None`` without that split."""
    model, fabric, monitor = session.recipe.model, session.fabric, session.monitor
    dataset = splits_of(session.recipe.data).get(split)
    if dataset is None:
        return None
    loader = _loader(session, dataset)
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
        packs = capability(model, Packable).packs()
        pieces = cut_batch(range(len(dataset)), cut, shares, dataset.lengths, packs)
        own = pieces, loader, session.quarantine, share, shares, once
        for micro in evaluation_micro_batches(split, *own, on_load=partial(monitor.set_activity, "evaluation")):
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
