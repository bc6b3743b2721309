"""A launched, checked and loaded recipe: what training and evaluation share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from trainer.contract import Data, Model, Request
from trainer.data.loader import Loader
from trainer.engine.forward import Forward
from trainer.engine.loop import evaluate
from trainer.engine.window import Cut, MicroBatch, Windows, cut_batch
from trainer.errors import require
from trainer.memory.monitor import Monitor
from trainer.memory.plan import Plan, cut_at, decide_plan
from trainer.memory.snapshot import require_recordable
from trainer.recipe import Recipe
from trainer.report.loggers import require_loggers
from trainer.report.metrics import ClassificationMetrics, EvaluationResult
from trainer.world import adopt_fabric_run, detect_world, launch, on_first_rank_first

FILLED_FROM_DATA = ("num_classes", "image_size", "channels", "class_names")
EVALUATION_FACTOR = 2
"""Evaluation keeps no activations, so its micro-batches can be larger than training's and still peak below them."""


@dataclass
class Session:
    """A recipe whose processes are launched and whose data is prepared."""

    recipe: Recipe
    plan: Plan
    fabric: Fabric
    monitor: Monitor = field(init=False)
    recoveries: int = 0

    def __post_init__(self) -> None:
        # From here on: everything is imported, nothing of the model is there.
        self.monitor = Monitor(self.fabric.device)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.fabric.global_rank == 0


@contextmanager
def open_session(recipe: Recipe, saved_in: Path | None = None) -> Iterator[Session]:
    """Launch the processes, prepare model and data, and fill in what only the data knows.

    Args:
        recipe: what to run.
        saved_in: the folder of a trained model to use instead of a new one.
    """
    require_loggers(recipe.run.logger)
    joined = torch.distributed.is_initialized()
    try:
        yield _open(recipe, saved_in)
    finally:
        if not joined and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # else gloo aborts one process in five at its exit


def _open(recipe: Recipe, saved_in: Path | None) -> Session:
    recipe = adopt_fabric_run(recipe)
    world = detect_world(recipe)
    if saved_in is None:
        require_recordable(recipe, world.accelerator)
    plan = decide_plan(recipe, world.size)  # refuse what cannot work before other processes are started
    fabric = launch(plan, world)
    if saved_in is not None and recipe.model.own_format:
        recipe = recipe.replace(model=recipe.model.saved_in(saved_in))

    def prepare() -> None:
        if saved_in is None:
            recipe.model.prepare()
        recipe.data.prepare(recipe.model.tokenizer_or_none())

    on_first_rank_first(fabric, prepare)
    require(len(recipe.data.train) > 0, "the training set is empty")
    recipe = recipe.replace(model=fill_from_data(recipe.model, recipe.data))
    return Session(recipe, decide_plan(recipe, world.size), fabric)


def fill_from_data(model: Model, data: Data) -> Model:
    """The model with the fields that were left at ``None`` taken from the dataset.

    Raises:
        RecipeError: when both know and do not agree.
    """
    changes = {}
    for name in FILLED_FROM_DATA:
        own, known = getattr(model, name, None), getattr(data, name, None)
        if known is None or not hasattr(model, name):
            continue
        if own is None:
            changes[name] = known
        elif name != "class_names":
            require(
                own == known, f"model.{name}={own} does not fit the data, which has {known}: leave model.{name} at null"
            )
    return dataclasses.replace(model, **changes) if changes else model  # type: ignore[type-var]


def _loader(session: Session, split: Any) -> Loader:
    data, fabric = session.recipe.data, session.fabric
    return Loader(split, data.collate, workers=data.workers, pin_memory=fabric.device.type == "cuda")


def training_windows(session: Session) -> Windows:
    """This rank's share of the training batches."""
    recipe, fabric = session.recipe, session.fabric
    loader = _loader(session, recipe.data.train)
    return windows_of(recipe, loader, fabric.global_rank, fabric.world_size, host_sum(fabric))


def windows_of(
    recipe: Recipe,
    fetch: Loader,
    rank: int = 0,
    world_size: int = 1,
    reduce: Callable[[list[float]], list[float]] = list,
) -> Windows:
    """The share of one rank in the training batches of a recipe whose data is prepared; see ``Windows``."""
    train = recipe.data.train
    return Windows(
        size=len(train),
        cut_at=partial(cut_at, recipe, world_size),
        fetch=fetch,
        weigh=recipe.model.weigh,
        seed=recipe.seed,
        rank=rank,
        world_size=world_size,
        reduce=reduce,
        lengths=getattr(train, "lengths", None),
        augmented=bool(getattr(train, "augmented", False)),
    )


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
        own = pieces[fabric.global_rank :: fabric.world_size]
        # An empty piece borrows a sample, as in training: every rank makes the same number of forwards.
        batches = loader(Request(piece or pieces[0][-1:]) for piece in own)
        for piece, batch in zip(own, batches, strict=True):
            yield MicroBatch(batch, seed=0, is_last=False, is_empty=not piece)

    def run() -> EvaluationResult:
        with session.monitor.evaluating():
            return evaluate(forward, micro_batches(), metrics)

    return run


def evaluation_cut(training: Cut, samples: int) -> Cut:
    """How an evaluation of ``samples`` is cut, for a run whose training is cut like ``training``."""
    return Cut(
        batch_size=samples,
        micro_batch_size=training.micro_batch_size * EVALUATION_FACTOR,
        accumulate=1,
        micro_batch_tokens=training.micro_batch_tokens and training.micro_batch_tokens * EVALUATION_FACTOR,
    )
