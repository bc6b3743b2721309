"""A launched, checked and loaded recipe: what training and evaluation share; and what its ranks agree on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from lightning_fabric import Fabric
from torch import Tensor

from trainer.data.loader import Loader, loader_of
from trainer.data.workers import decide_workers
from trainer.engine.feed import evaluation_cut, evaluation_micro_batches, windows_of
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.engine.window import Cut, MicroBatch, Windows, cut_batch, share_of
from trainer.errors import EvaluationStopped, RecipeError, RunError, Stopped, require
from trainer.faults.signals import StopSignals, end_start_watch
from trainer.faults.watchdog import Watchdog
from trainer.launching.world import World
from trainer.memory.monitor import Monitor
from trainer.memory.oom import OutOfMemory, describe_oom, is_out_of_memory, sample_lengths, shapes_of
from trainer.memory.plan import Plan
from trainer.recipe import Memory, Recipe
from trainer.report.metrics import ClassificationMetrics, EvaluationResult
from trainer.report.mistakes import Mistakes, of_all_ranks
from trainer.report.scores import Scores
from trainer.run.forecast import Forecast
from trainer.run.listeners import report_bad_samples
from trainer.values import Loss, Task

T = TypeVar("T")


class Session:
    """A recipe whose processes are launched and whose data is prepared, and the watch over its ranks.

    Made by all ranks together, when everything is imported and nothing of the model is there. Nothing of it changes but
    the plan's cut, by :meth:`recut`, and who watches, by :meth:`guarded`.
    """

    def __init__(
        self, recipe: Recipe, plan: Plan, fabric: Fabric, world: World, forecast: Forecast | None = None
    ) -> None:
        self.recipe, self.plan, self.fabric, self.world, self.forecast = recipe, plan, fabric, world, forecast
        self.monitor, self.agreement = Monitor(fabric.device), Agreement(host_sum(fabric))

        def report(quarantine: Quarantine, new: list[BadSampleAt]) -> None:  # no method: that would be a circle
            if fabric.global_rank == 0:
                report_bad_samples(quarantine, new, recipe.run.dir)

        self.quarantine = Quarantine(recipe.data.max_bad_samples, report)
        self.watchdog: Watchdog | None = None
        self.signals: StopSignals | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.fabric.global_rank == 0

    @property
    def run_dir(self) -> Path:
        """What a run that trains writes to."""
        return Path(str(self.recipe.run.dir))

    def recut(self, cut: Cut) -> None:
        """Batches are cut like this from now on."""
        self.plan = replace(self.plan, first_cut=cut)

    def asked_to_stop(self) -> str | None:
        """The name of the signal that asked this process to stop, if one has."""
        return self.signals.received if self.signals is not None else None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Watch over this rank and the others meanwhile, and note signals that ask to stop.

        What is raised within is reported with rank, step, phase and samples, and told to the other ranks; a collective
        that broke because another rank ended becomes the :class:`PeerError` that says why that one did. Within another
        such block it is only this: errors are told before what lies between the two is cleaned up.

        Raises:
            OutOfMemory: for any out of memory: where it was and what to try.
        """
        if self.watchdog is not None:
            with self._explained(self.watchdog):
                yield
            return
        fabric = self.fabric
        watchdog = Watchdog(self.monitor, fabric.global_rank, fabric.world_size, self.recipe.run.hang_after)
        end_start_watch()
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
            if isinstance(error, Stopped) and self.signals is not None:
                self.signals.leaving = True
            raw = not isinstance(error, RunError) and is_out_of_memory(error)  # else a message, which may quote one
            explained = watchdog.explain(self._out_of_memory(error) if raw else error)
            if explained is error:
                raise
            raise explained from error

    def _out_of_memory(self, error: BaseException) -> OutOfMemory:
        monitor, batch = self.monitor, self.monitor.batch
        place = monitor.phase, self.fabric.global_rank, self.plan, sample_lengths(batch)
        shapes = shapes_of(batch)
        return OutOfMemory(describe_oom(error, *place, shapes=shapes, recipe=self.recipe, on_gpu=monitor.on_gpu))


def _loader(session: Session, split: Any) -> Loader:
    recipe, world = session.recipe, session.world
    workers = decide_workers(recipe.data, world.accelerator, world.devices)
    return loader_of(recipe, split, workers, pin_memory=session.fabric.device.type == "cuda")


def training_windows(session: Session) -> Windows:
    """This rank's share of the training batches."""
    recipe, ranks = session.recipe, (session.fabric.global_rank, session.fabric.world_size)
    loader = _loader(session, recipe.data.train)
    once = counted_once(recipe.memory, ranks[0], session.agreement)
    windows = windows_of(recipe, loader, *ranks, once, quarantine=session.quarantine)
    return replace(windows, on_epoch=partial(setattr, loader, "at_once"))


def evaluation(session: Session, forward: Forward, split: str) -> Callable[[], EvaluationResult] | None:
    """A function that evaluates on ``split``, every sample once over all ranks; ``None`` if there is no such split."""
    model, fabric, monitor = session.recipe.model, session.fabric, session.monitor
    dataset = getattr(session.recipe.data, split)
    if dataset is None:
        return None
    loader = _loader(session, dataset)
    classes, task = getattr(model, "num_classes", None), cast(Task, getattr(model, "task", "single_label"))
    asked, per_token = session.recipe.run.asked_figures(), getattr(dataset, "bytes_per_token", None)
    metrics = ClassificationMetrics(classes, fabric.device, model.loss_names, task, asked)
    mistakes = Mistakes(task == "single_label" and classes is not None, fabric.device)
    gather, decide = partial(rows_of_all, fabric), partial(on_first, fabric)
    others = [one for one in asked if one not in metrics.names]
    scores = Scores(others, getattr(model, "task", None), classes, gather, decide, per_token, split)
    memory, rank = session.recipe.memory, fabric.global_rank
    share, shares = share_of(memory, rank, fabric.world_size)
    once = counted_once(memory, rank, _sum_over(fabric, fabric.device))

    def micro_batches() -> Iterator[MicroBatch]:
        cut = evaluation_cut(session.plan.first_cut, len(dataset))  # smaller after a recovery
        lengths = getattr(dataset, "lengths", None)
        pieces = cut_batch(range(len(dataset)), cut, shares, lengths, model.packs())
        own = pieces, loader, session.quarantine, share, shares, once
        for micro in evaluation_micro_batches(split, *own, on_load=partial(monitor.doing, "evaluation")):
            micro.is_empty |= rank % memory.tensor_parallel > 0  # another rank counts the same samples
            # An evaluation may take longer than a scheduler waits after its signal.
            if any(session.agreement.total([float(session.asked_to_stop() is not None)])):
                raise EvaluationStopped(f"the evaluation of {split} was left: a rank was asked to stop")
            monitor.batch, mistakes.samples = micro.batch, micro.indices
            yield micro

    def run() -> EvaluationResult:
        with monitor.evaluating():
            return evaluate(forward, micro_batches(), Evaluated(metrics, mistakes, scores))

    return run


class Evaluated(NamedTuple):
    """All that an evaluation looks for, as one."""

    metrics: ClassificationMetrics
    mistakes: Mistakes
    scores: Scores

    def reset(self) -> None:
        for part in self:
            part.reset()

    def update(self, loss: Loss) -> None:
        for part in self:
            part.update(loss)

    def compute(self) -> EvaluationResult:
        """A collective."""
        result = self.metrics.compute()
        others = {**result.others, **self.scores.compute(result.loss)}
        return replace(result, others=others, mistakes=self.mistakes.worst())


# What the ranks decide together, most of it without a collective of its own.
#
# Before every step the ranks sum the weights of the batch on the host. What each has to tell the others (it was asked
# to stop, a checkpoint is due) travels in the same sum, so all know it at the same step boundary, at no cost.

Sum = Callable[[list[float]], list[float]]


class Agreement:
    """Sums floats over the ranks, and the votes of this rank with them."""

    def __init__(self, total: Sum) -> None:
        self.total = total
        self.votes: Callable[[], Sequence[float]] = tuple
        """Gives numbers, as many on every rank, whenever all sum something."""
        self.agreed: list[float] = []
        """The sums of the votes, as of the last call."""

    def __call__(self, values: list[float]) -> list[float]:
        totals = self.total([*values, *self.votes()])
        self.agreed = totals[len(values) :]
        return totals[: len(values)]


def host_sum(fabric: Fabric) -> Sum:
    """Sums floats over the ranks on the host: through gloo, so that no rank waits for its GPU. A collective."""
    beside = fabric.world_size > 1 and fabric.device.type == "cuda"
    return _sum_over(fabric, torch.device("cpu"), torch.distributed.new_group(backend="gloo") if beside else None)


def _sum_over(fabric: Fabric, device: torch.device, group: Any = None) -> Sum:
    """Sums on ``device``, by default in whatever group the ranks are in by then."""

    def total(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(tensor, group=group)
        return tensor.tolist()

    return total if fabric.world_size > 1 else list


def counted_once(memory: Memory, rank: int, total: Sum) -> Sum:
    """``total`` over the shares of a batch: of ranks that are tensor parallel the first one counts.

    They must have read the same samples. If not (a file that only one of them could read), all ranks are told so
    before any computes: their parts of one activation would be of different samples.
    """
    copies = memory.tensor_parallel

    def once(values: list[float]) -> list[float]:
        found = total([*(value * (rank % copies == 0) for value in values), *values])
        sums, everywhere = found[: len(values)], found[len(values) :]
        alike = all(math.isclose(a * copies, b, rel_tol=1e-9) for a, b in zip(sums, everywhere, strict=True))
        if not alike:
            raise RunError(
                f"memory.tensor_parallel={copies}: ranks that share every block have read different samples, or could "
                "not read the same ones: look for a disk that only some of them reach, and go on with run.resume auto"
            )
        return sums

    return once if copies > 1 else total


def on_first(fabric: Fabric, decide: Callable[[], T]) -> T:
    """What ``decide`` returns on the first rank, on all ranks, as JSON has it; what it refuses, all refuse alike."""
    outcome: tuple[Any, str | None] = (None, None)
    if fabric.global_rank == 0:
        try:
            outcome = decide(), None
        except RecipeError as error:
            outcome = None, str(error)
    value, refusal = from_first(fabric, outcome)
    require(refusal is None, str(refusal))
    return value


def from_first(fabric: Fabric, value: Any) -> Any:
    """What the first rank gives, on all ranks: as JSON has it, for torch's own broadcast of objects unpickles them."""
    if fabric.world_size == 1:
        return value
    content = _packed(fabric, value)
    size = torch.tensor(len(content), device=fabric.device)
    torch.distributed.broadcast(size, 0)
    if fabric.global_rank != 0:
        content = torch.empty(int(size), dtype=torch.uint8, device=fabric.device)
    torch.distributed.broadcast(content, 0)
    return json.loads(bytes(content.tolist()))


def from_all(fabric: Fabric, value: Any) -> list[Any]:
    """What every rank gives, in their order, likewise."""
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


def rows_of_all(fabric: Fabric, rows: Tensor | None) -> Tensor | None:
    """The rows that the ranks have, in their order, in host memory; a rank may have none. A collective."""
    if fabric.world_size == 1:
        return rows
    pieces = []
    kinds = from_all(fabric, None if rows is None else [str(rows.dtype).removeprefix("torch."), list(rows.shape)])
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
