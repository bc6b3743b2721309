"""A launched, checked and loaded recipe: what training and evaluation share; and what its ranks agree on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric

from trainer.data.loader import Loader, loader_of
from trainer.data.workers import decide_workers
from trainer.engine.feed import evaluation_cut, evaluation_micro_batches, windows_of
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.engine.window import Cut, MicroBatch, Windows, cut_batch
from trainer.errors import EvaluationStopped, RecipeError, require
from trainer.launching.world import World
from trainer.memory.monitor import Monitor
from trainer.memory.plan import Plan
from trainer.recipe import Recipe
from trainer.report.metrics import ClassificationMetrics, EvaluationResult
from trainer.run.forecast import Forecast
from trainer.run.guard import Guard
from trainer.run.listeners import report_bad_samples

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """A recipe whose processes are launched and whose data is prepared. Nothing of it changes but the plan's cut."""

    recipe: Recipe
    plan: Plan
    fabric: Fabric
    world: World
    forecast: Forecast | None
    monitor: Monitor
    agreement: Agreement
    quarantine: Quarantine
    guard: Guard

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan, fabric: Fabric, world: World, forecast: Forecast | None = None) -> Session:
        """Made when everything is imported, and nothing of the model is there. A collective."""

        def announce(quarantine: Quarantine, new: list[BadSampleAt]) -> None:
            if fabric.global_rank == 0:
                report_bad_samples(quarantine, new, recipe.run.dir)

        monitor, agreement = Monitor(fabric.device), Agreement(host_sum(fabric))
        quarantine = Quarantine(recipe.data.max_bad_samples, announce)
        guard = Guard(recipe, fabric, monitor)
        return cls(recipe, plan, fabric, world, forecast, monitor, agreement, quarantine, guard)

    def recut(self, cut: Cut) -> None:
        """Batches are cut like this from now on."""
        object.__setattr__(self, "plan", replace(self.plan, first_cut=cut))

    def guarded(self) -> AbstractContextManager[None]:
        """Watch over this rank and the others meanwhile; see :class:`Guard`."""
        return self.guard.watching(lambda: self.plan)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.fabric.global_rank == 0


def _loader(session: Session, split: Any) -> Loader:
    recipe, world = session.recipe, session.world
    workers = decide_workers(recipe.data, world.accelerator, world.devices)
    return loader_of(recipe, split, workers, pin_memory=session.fabric.device.type == "cuda")


def training_windows(session: Session) -> Windows:
    """This rank's share of the training batches."""
    recipe, fabric = session.recipe, session.fabric
    loader = _loader(session, recipe.data.train)
    windows = windows_of(
        recipe, loader, fabric.global_rank, fabric.world_size, session.agreement, quarantine=session.quarantine
    )
    windows.on_load = session.monitor.load
    return windows


def host_sum(fabric: Fabric) -> Callable[[list[float]], list[float]]:
    """Sums floats over the ranks on the host: through gloo, so that no rank waits for its GPU."""
    if fabric.world_size == 1:
        return list
    on_gpu = fabric.device.type == "cuda"
    group: Any = torch.distributed.new_group(backend="gloo") if on_gpu else None

    def total(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, group=group)
        return tensor.tolist()

    return total


def device_sum(fabric: Fabric) -> Callable[[list[float]], list[float]]:
    """Sums floats over the ranks on the device, in whatever group the ranks are in by then."""

    def total(values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=fabric.device)
        if fabric.world_size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor.tolist()

    return total


def evaluation(session: Session, forward: Forward, split: str) -> Callable[[], EvaluationResult] | None:
    """A function that evaluates on ``split``, every sample once over all ranks; ``None`` if there is no such split."""
    data, fabric = session.recipe.data, session.fabric
    dataset = getattr(data, split)
    if dataset is None:
        return None
    loader = _loader(session, dataset)
    num_classes = getattr(session.recipe.model, "num_classes", None)
    metrics = ClassificationMetrics(num_classes, fabric.device, session.recipe.model.loss_names)

    def micro_batches() -> Iterator[MicroBatch]:
        cut = evaluation_cut(session.plan.first_cut, len(dataset))  # smaller after a recovery
        pieces = cut_batch(range(len(dataset)), cut, fabric.world_size, getattr(dataset, "lengths", None))
        found = evaluation_micro_batches(
            split,
            pieces,
            loader,
            session.quarantine,
            fabric.global_rank,
            fabric.world_size,
            device_sum(fabric),
            on_load=partial(session.monitor.doing, "evaluation"),
        )
        for micro in found:
            # An evaluation may take longer than a scheduler waits after its signal.
            if any(session.agreement.total([float(session.guard.asked_to_stop() is not None)])):
                raise EvaluationStopped(f"the evaluation of {split} was left: a rank was asked to stop")
            session.monitor.batch = micro.batch
            yield micro

    def run() -> EvaluationResult:
        with session.monitor.evaluating():
            return evaluate(forward, micro_batches(), metrics)

    return run


# What the ranks decide together, most of it without a collective of its own.
#
# Before every step the ranks sum the weights of the batch on the host. What each has to tell the others (it was asked
# to stop, a checkpoint is due) travels in the same sum, so all know it at the same step boundary, at no cost.

Sum = Callable[[list[float]], list[float]]


class Agreement:
    """Sums floats over the ranks, and the votes of this rank with them.

    Args:
        total: sums a list of floats over all ranks.
    """

    def __init__(self, total: Sum) -> None:
        self.total = total
        self.votes: Callable[[], Sequence[float]] = tuple
        self.agreed: list[float] = []
        """The sums of the votes, as of the last call."""

    def ask(self, votes: Callable[[], Sequence[float]]) -> None:
        """Ask this rank for ``votes``, numbers, as many on every rank, whenever all sum something."""
        self.votes = votes

    def leave(self) -> None:
        """Let go of the group of the ranks, whose connections it keeps."""
        self.total = list

    def meet(self, fabric: Fabric) -> None:
        """Sum over the group that the ranks are in now. A collective."""
        self.total = host_sum(fabric)

    def __call__(self, values: list[float]) -> list[float]:
        totals = self.total([*values, *self.votes()])
        self.agreed = totals[len(values) :]
        return totals[: len(values)]


def on_first(fabric: Fabric, decide: Callable[[], T]) -> T:
    """What ``decide`` returns on the first rank, on all ranks, as JSON has it; what it refuses, all refuse alike.

    Raises:
        RecipeError: the first rank's.
    """
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
    found = [torch.empty_like(padded) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(found, padded)
    return [json.loads(bytes(one[:size].tolist())) for one, size in zip(found, sizes.tolist(), strict=True)]


def _packed(fabric: Fabric, value: Any) -> torch.Tensor:
    content = bytearray(json.dumps(value).encode())
    return torch.frombuffer(content, dtype=torch.uint8).to(fabric.device)
