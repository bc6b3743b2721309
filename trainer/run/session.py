"""A launched recipe with its prepared data, and the exchange of values between its ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from lightning_fabric import Fabric
from torch import Tensor

from trainer.contract import Packable, capability, splits_of
from trainer.data.loader import Loader, make_loader
from trainer.data.workers import decide_workers
from trainer.engine.cut import Cut, cut_batch, data_parallel_rank
from trainer.engine.data_feed import evaluation_cut, evaluation_micro_batches, make_windows
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.engine.window import MicroBatch, Windows
from trainer.errors import EvaluationInterruptedError, RecipeError, RunError, RunStoppedError
from trainer.faults.signals import StopSignals, end_startup_watch
from trainer.faults.watchdog import PeerError, Watchdog
from trainer.launching.world import World
from trainer.memory.monitor import MemoryMonitor
from trainer.memory.oom import OutOfMemoryError, describe_oom, is_out_of_memory, sample_lengths, shapes_of
from trainer.memory.plan import Plan
from trainer.recipe import Memory, Recipe
from trainer.report.metrics import EvaluationMetrics, EvaluationResult
from trainer.report.mistakes import TopMistakes, of_all_ranks
from trainer.report.whole_set_metrics import WholeSetMetrics
from trainer.run.listeners import report_bad_samples
from trainer.run.run_prediction import RunPrediction
from trainer.values import Loss

T = TypeVar("T")


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

        An exception is reported with rank, step, phase and samples, and announced to the other ranks. A collective that
        failed because another rank ended raises a :class:`PeerError` with the reason of that rank. A nested block only
        does this, so that errors are announced before the outer block cleans up.

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
    once = sum_over_data_parallel(memory, rank, _sum_over(fabric, fabric.device))

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


# Decisions of all ranks, most of them without an additional collective.
#
# Before every step the ranks sum the weights of the batch on the host. Votes of each rank (it was asked to stop, a
# checkpoint is due) are part of the same sum, so all ranks know them at the same step boundary, at no extra cost.

Sum = Callable[[list[float]], list[float]]


class VotedSum:
    """Sums floats over the ranks, together with the votes of this rank."""

    def __init__(self, total: Sum) -> None:
        self.connect(total)
        self.collect(tuple)
        self.agreed: list[float] = []  # sums of the votes in the last call

    def connect(self, total: Sum) -> None:
        """Sum by ``total`` from now on; by ``list`` while this rank is in no process group."""
        self.total = total

    def collect(self, votes: Callable[[], Sequence[float]]) -> None:
        """Add the numbers that ``votes`` returns to every sum; all ranks must return the same number of them."""
        self._votes = votes

    def __call__(self, values: list[float]) -> list[float]:
        totals = self.total([*values, *self._votes()])
        self.agreed = totals[len(values) :]
        return totals[: len(values)]


def make_host_sum(fabric: Fabric) -> Sum:
    """Return a sum over the ranks on the host, through gloo, so that no rank waits for its GPU. A collective."""
    needs_gloo = fabric.world_size > 1 and fabric.device.type == "cuda"
    return _sum_over(fabric, torch.device("cpu"), torch.distributed.new_group(backend="gloo") if needs_gloo else None)


def _sum_over(fabric: Fabric, device: torch.device, group: Any = None) -> Sum:
    """Return a sum over the ranks on ``device``; without ``group``, in the default group at the time of the call."""

    def total(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(tensor, group=group)
        return tensor.tolist()

    return total if fabric.world_size > 1 else list


def sum_over_data_parallel(memory: Memory, rank: int, total: Sum) -> Sum:
    """Return ``total`` over the shares of a batch: of several tensor-parallel ranks, only the first counts.

    These ranks must have read the same samples, because they compute parts of the same activations. If they have not
    (for example, only one could read a file), all ranks raise an error before they compute.
    """
    copies = memory.tensor_parallel

    def once(values: list[float]) -> list[float]:
        found = total([*(value * (rank % copies == 0) for value in values), *values])
        sums, everywhere = found[: len(values)], found[len(values) :]
        alike = all(math.isclose(a * copies, b, rel_tol=1e-9) for a, b in zip(sums, everywhere, strict=True))
        if not alike:
            raise RunError(
                f"memory.tensor_parallel={copies}: ranks that share every block have read different samples, or could "
                "not read the same ones: look for a disk that only some of them reach, then use run.resume auto"
            )
        return sums

    return once if copies > 1 else total


def run_on_rank_zero(fabric: Fabric, decide: Callable[[], T]) -> T:
    """Run ``decide`` on the first rank; return its result as JSON, or raise its RecipeError, on all ranks."""
    outcome: tuple[Any, str | None] = (None, None)
    if fabric.global_rank == 0:
        try:
            outcome = decide(), None
        except RecipeError as error:
            outcome = None, str(error)
    value, refusal = broadcast_json(fabric, outcome)
    if refusal is not None:
        raise RecipeError(refusal)
    return value


def broadcast_json(fabric: Fabric, value: Any) -> Any:
    """Broadcast the value of the first rank as JSON, because torch's broadcast of objects unpickles them."""
    if fabric.world_size == 1:
        return value
    content = _packed(fabric, value)
    size = torch.tensor(len(content), device=fabric.device)
    torch.distributed.broadcast(size, 0)
    if fabric.global_rank != 0:
        content = torch.empty(int(size), dtype=torch.uint8, device=fabric.device)
    torch.distributed.broadcast(content, 0)
    return json.loads(bytes(content.tolist()))


def all_gather_json(fabric: Fabric, value: Any) -> list[Any]:
    """Gather the values of all ranks as JSON, in the order of the ranks."""
    if fabric.world_size == 1:
        return [value]
    content = _packed(fabric, value)
    sizes = torch.zeros(fabric.world_size, dtype=torch.long, device=fabric.device)
    sizes[fabric.global_rank] = len(content)
    torch.distributed.all_reduce(sizes)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=fabric.device)
    padded[: len(content)] = content
    found = zip(of_all_ranks(padded), sizes.tolist(), strict=True)
    return [json.loads(bytes(one[:size].tolist())) for one, size in found]


def gather_rows(fabric: Fabric, rows: Tensor | None) -> Tensor | None:
    """Concatenate the rows of all ranks in host memory, in the order of the ranks. A collective. A rank may have none.
    The result is ``None`` on all ranks except the first, and if no rank has rows."""
    if fabric.world_size == 1:
        return rows
    pieces = []
    kinds = all_gather_json(
        fabric, None if rows is None else [str(rows.dtype).removeprefix("torch."), list(rows.shape)]
    )
    for rank, kind in enumerate(kinds):
        if kind is None:
            continue
        if rank == fabric.global_rank and rows is not None:
            piece = rows.to(fabric.device).contiguous()
        else:
            piece = torch.empty(kind[1], dtype=getattr(torch, kind[0]), device=fabric.device)
        torch.distributed.broadcast(piece, rank)
        if fabric.global_rank == 0:
            pieces.append(piece.cpu())
    return torch.cat(pieces) if pieces else None


def _packed(fabric: Fabric, value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(fabric.device)
