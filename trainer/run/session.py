"""A launched, checked and loaded recipe: what training and evaluation share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric

from trainer.contract import Data
from trainer.data.loader import Loader, loader_of
from trainer.data.workers import decide_workers
from trainer.engine.feed import evaluation_cut, evaluation_micro_batches, fill_from_data, windows_of
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.quarantine import BadSampleAt, Quarantine
from trainer.engine.window import MicroBatch, Windows, cut_batch
from trainer.errors import EvaluationStopped, RecipeError, require
from trainer.faults.regroup import keep_ranks_alive, recovers
from trainer.faults.signals import SECONDS_TO_LEAVE, StopSignals, ended_after, have_started, watch_start
from trainer.faults.watchdog import Watchdog
from trainer.launching.meeting import meet
from trainer.launching.start import announced, launch, on_first_rank_first
from trainer.launching.world import World, find_world
from trainer.memory.monitor import Monitor, require_recordable
from trainer.memory.plan import Plan, decide_plan
from trainer.recipe import Recipe
from trainer.report.loggers import require_loggers
from trainer.report.metrics import ClassificationMetrics, EvaluationResult
from trainer.report.progress import Progress
from trainer.run.forecast import Forecast, forecast, forget_plan, planned
from trainer.run.listeners import report_bad_samples
from trainer.system.reports import placed
from trainer.system.text import parse_budget

T = TypeVar("T")

SECONDS_TO_START = 60.0
"""How much later than on the first machine a rank may have started on another, at least."""


@dataclass
class Session:
    """A recipe whose processes are launched and whose data is prepared."""

    recipe: Recipe
    plan: Plan
    fabric: Fabric
    world: World
    forecast: Forecast | None = None
    agreement: Agreement = field(init=False)
    monitor: Monitor = field(init=False)
    quarantine: Quarantine = field(init=False)
    recoveries: int = 0
    watchdog: Watchdog | None = None
    signals: StopSignals | None = None

    def __post_init__(self) -> None:
        # From here on: everything is imported, nothing of the model is there.
        self.monitor = Monitor(self.fabric.device)
        self.agreement = Agreement(host_sum(self.fabric))
        self.quarantine = Quarantine(self.recipe.data.max_bad_samples, self._announce)

    def _announce(self, quarantine: Quarantine, new: list[BadSampleAt]) -> None:
        if self.is_first:
            report_bad_samples(quarantine, new, self.recipe.run.dir)

    def asked_to_stop(self) -> str | None:
        """The name of the signal that asked this process to stop, if one has."""
        return self.signals.received if self.signals is not None else None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.fabric.global_rank == 0

    def on_first(self, decide: Callable[[], T]) -> T:
        """What ``decide`` returns on the first rank, on all ranks, as JSON has it; what it refuses, all refuse alike.

        Raises:
            RecipeError: the first rank's.
        """
        outcome: tuple[Any, str | None] = (None, None)
        if self.is_first:
            try:
                outcome = decide(), None
            except RecipeError as error:
                outcome = None, str(error)
        value, refusal = from_first(self.fabric, outcome)
        require(refusal is None, str(refusal))
        return value


@contextmanager
def open_session(recipe: Recipe, saved_in: Path | None = None) -> Iterator[Session]:
    """Launch the processes, prepare model and data, and fill in what only the data knows.

    Args:
        recipe: what to run.
        saved_in: the folder of a trained model to use instead of a new one.
    """
    require_loggers(recipe.run.logger)
    joined = torch.distributed.is_initialized()
    session: Session | None = None
    try:
        session = _open(recipe, saved_in)
        yield session
    finally:
        if session is not None and session.forecast is not None:
            session.forecast.close()
        if not joined and torch.distributed.is_initialized():
            with ended_after(SECONDS_TO_LEAVE):
                torch.distributed.destroy_process_group()  # else gloo aborts one process in five at its exit


def _open(recipe: Recipe, saved_in: Path | None) -> Session:
    recipe, world = find_world(recipe)
    unprepared = recipe.data.train
    if saved_in is None:
        require_recordable(recipe, world.accelerator)
        recipe = planned(recipe, world, partial(print, flush=True))
    plan = decide_plan(recipe, world.size)  # refuse what cannot work before other processes are started
    outlook = forecast(recipe, world) if saved_in is None else None
    if saved_in is None and recovers(recipe, plan):
        keep_ranks_alive()
    patience = max(SECONDS_TO_START, recipe.run.hang_after)
    meeting = meet(patience)
    fabric = launch(plan, world, watch_start, patience)
    del meeting
    world = announced(world, plan, Progress(recipe.run.progress, fabric.global_rank).message)
    keep_to_budget(recipe, fabric.device)
    if saved_in is not None and recipe.model.own_format:
        recipe = recipe.replace(model=recipe.model.saved_in(saved_in))

    def prepare() -> None:
        with placed("preparing model and data"):
            if saved_in is None:
                recipe.model.prepare()
            if recipe.data.train is unprepared:  # else the planner has done it
                recipe.data.prepare(recipe.model.tokenizer_or_none())
            _require_samples(recipe.data)

    on_first_rank_first(fabric, prepare)
    have_started()
    forget_plan(world)
    recipe = recipe.replace(model=fill_from_data(recipe.model, recipe.data))
    return Session(recipe, decide_plan(recipe, world.size), fabric, world, outlook)


def _require_samples(data: Data) -> None:
    """A training set there must be, and none may be empty.

    Raises:
        RecipeError: naming the dataset.
    """
    name = type(data).__name__
    require(data.train is not None, f"{name}.prepare() has not set train: set it to the samples to train on")
    for split, words in (("train", "training"), ("val", "validation"), ("test", "test")):
        samples = getattr(data, split)
        empty = samples is not None and len(samples) == 0
        require(
            not empty, f"the {words} set is empty" + ("" if split == "train" else f": leave {name}.{split} at None")
        )


def keep_to_budget(recipe: Recipe, device: torch.device) -> None:
    """Let torch's allocator take no more of a GPU than ``memory.budget`` says: a run that errs must not take it all."""
    if recipe.memory.budget is None or device.type != "cuda":
        return
    size, is_fraction = parse_budget(recipe.memory.budget)
    fraction = size if is_fraction else size / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)


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
            if any(session.agreement.total([float(session.asked_to_stop() is not None)])):
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
        votes: what this rank says at the moment: numbers, as many on every rank.
    """

    def __init__(self, total: Sum, votes: Callable[[], Sequence[float]] = tuple) -> None:
        self.total, self.votes = total, votes
        self.agreed: list[float] = []
        """The sums of the votes, as of the last call."""

    def __call__(self, values: list[float]) -> list[float]:
        totals = self.total([*values, *self.votes()])
        self.agreed = totals[len(values) :]
        return totals[: len(values)]


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
