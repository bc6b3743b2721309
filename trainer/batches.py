"""From prepared data to batches: what a run, and the prediction of one, are fed with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from trainer.contract import Data, Model
from trainer.data.loader import Loader
from trainer.engine.window import Cut, Windows
from trainer.errors import require
from trainer.memory.plan import cut_at
from trainer.recipe import Recipe

FILLED_FROM_DATA = ("num_classes", "image_size", "channels", "class_names")
EVALUATION_FACTOR = 2
"""Evaluation keeps no activations, so its micro-batches can be larger than training's and still peak below them."""


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


def evaluation_cut(training: Cut, samples: int) -> Cut:
    """How an evaluation of ``samples`` is cut, for a run whose training is cut like ``training``."""
    return Cut(
        batch_size=samples,
        micro_batch_size=training.micro_batch_size * EVALUATION_FACTOR,
        accumulate=1,
        micro_batch_tokens=training.micro_batch_tokens and training.micro_batch_tokens * EVALUATION_FACTOR,
    )
