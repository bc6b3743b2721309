"""Build the micro-batches of training and evaluation from prepared data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trainer.contract import Data, DrawnInputs, Model, Packable, Preparable, WholeBatch, as_samples, capability
from trainer.engine.cut import Cut, cut_at, data_parallel_rank
from trainer.engine.quarantine import Quarantine, Reduce
from trainer.engine.window import Fetch, MicroBatch, OnLoad, Windows, make_micro_batch
from trainer.errors import RecipeError, format_list, require
from trainer.recipe import Recipe
from trainer.values import BadSample, Request, SampleWeights

EVALUATION_FACTOR = 2  # evaluation keeps no activations: its micro-batches may be larger than training's


def fill_from_data(model: Model, data: Data) -> Model:
    """Fill fields of the model that are ``None`` from the dataset; values that both define must agree."""
    names, classes = data.class_names or (), data.num_classes
    # A name that cannot be encoded comes from a folder name that is not UTF-8, or from broken JSON.
    broken = [ascii(name) for name in names if str(name).encode(errors="replace").decode() != str(name)]
    require(not broken, f"data: class {format_list(broken)} is not UTF-8 text: rename its folder or label")
    if names and classes is not None and len(names) != classes:
        fix = "give each class a name"
        raise RecipeError(f"{type(data).__name__} has {len(names)} class_names for num_classes={classes}: {fix}")
    changes = {}
    fields = {field.name for field in dataclasses.fields(model)} if dataclasses.is_dataclass(model) else ()
    pairs: dict[str, tuple[Any, Any]] = {"num_classes": (model.num_classes, classes)}
    pairs |= {"image_size": (model.image_size, data.image_size), "channels": (model.channels, data.channels)}
    pairs["class_names"] = model.class_names, data.class_names
    for name, (own, known) in pairs.items():
        if own is None and known is not None and name in fields:
            changes[name] = known
        elif own is not None and known not in (None, own) and name != "class_names":
            raise RecipeError(f"model.{name}={own} does not fit the data, which has {known}: set it to null")
    model = dataclasses.replace(model, **changes) if changes else model  # type: ignore[type-var]
    return model.suited_to(data) if isinstance(model, Preparable) else model


def make_windows(
    recipe: Recipe,
    fetch: Fetch,
    rank: int = 0,
    world_size: int = 1,
    reduce: Reduce = list,
    quarantine: Quarantine | None = None,
) -> Windows:
    """Return this rank's share of the training batches of a prepared recipe; ``reduce`` sums over the shares."""
    train, drawn = as_samples(recipe.data.train), capability(recipe.model, DrawnInputs)
    lengths = train.lengths
    if recipe.memory.micro_batch_tokens is not None and lengths is None:
        cause = f"memory.micro_batch_tokens={recipe.memory.micro_batch_tokens} needs the length of every sample"
        raise RecipeError(f"{cause}, which {type(recipe.data).__name__} does not know before reading it: leave it out")
    mixing, name = recipe.data.mixup_config(), type(recipe.model).__name__
    if mixing is not None and not drawn.mixes:
        raise RecipeError(
            f"data.mixup, data.cutmix: {name}.losses() supports one label per sample: set both to 0, or read "
            "batch['mixed_labels'] and batch['lam'] in it (docs/augmentation.md) and set mixes = True"
        )
    share, shares = data_parallel_rank(recipe.memory, rank, world_size)
    return Windows(
        size=len(train),
        cut_at=partial(cut_at, recipe, world_size),
        fetch=fetch,
        weigh=recipe.model.weigh,
        seed=recipe.seed,
        rank=share,
        world_size=shares,
        reduce=reduce,
        lengths=lengths,
        packs=capability(recipe.model, Packable).packs(),
        groups=train.groups,
        sample_weights=_chances(recipe.data),
        longest_candidates=train.longest,
        augmented=bool(train.augmented) or drawn.seeded,
        mixing=mixing,
        quarantine=Quarantine(limit=None) if quarantine is None else quarantine,
        whole=isinstance(recipe.model, WholeBatch),
        changes=sorted(recipe.accumulate) if isinstance(recipe.accumulate, Mapping) else (),
    )


def _chances(data: Data) -> SampleWeights | None:
    relative, name = data.sample_weights(), type(data).__name__
    if relative is None:
        return None
    size, said = len(data.train), f"{name}.sample_weights()"
    if len(relative) != size:
        raise RecipeError(f"{said} returns {len(relative)} numbers for {size} training samples: return one per sample")
    array = np.asarray(relative, dtype=np.float64)
    if not (np.isfinite(array).all() and array.min(initial=0) >= 0 and array.sum() > 0):
        raise RecipeError(f"{said} must return finite numbers of at least 0, and not only zeros")
    if as_samples(data.train).groups is not None:
        raise RecipeError(f"{name} reads groups of samples in sequence and cannot draw single ones: omit {said}")
    return SampleWeights(relative)


def evaluation_micro_batches(
    split: str,  # val or test
    pieces: Sequence[Sequence[int]],  # the samples of all micro-batches, over all ranks
    loader: Fetch,  # reads samples of the split
    quarantine: Quarantine,  # receives the samples that could not be loaded, at the end
    rank: int = 0,
    world_size: int = 1,
    reduce: Reduce = list,
    on_load: OnLoad = lambda samples: None,
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of an evaluation; their number is the same on all ranks."""
    kept = [list(quarantine.filter(split, piece)) for piece in pieces]
    own = kept[rank::world_size]
    # An empty piece borrows a sample, as in training, so that every rank runs the same number of forwards.
    spare = next((piece for piece in kept if piece), list(pieces[0]))[-1:]
    bad: list[BadSample] = []
    batches = loader(Request(piece or spare) for piece in own)
    for piece in own:
        on_load(piece)
        micro, found = make_micro_batch(next(batches), piece, seed=0, is_last=False, is_empty=not piece)
        bad += found
        yield micro
    if quarantine.limit and any(reduce([float(len(bad))])):
        quarantine.exchange(split, bad, reduce, rank, world_size)


def evaluation_cut(training: Cut, num_samples: int) -> Cut:
    """Return the cut of an evaluation of ``num_samples``, given the cut of training."""
    tokens = training.micro_batch_tokens and training.micro_batch_tokens * EVALUATION_FACTOR
    return Cut(num_samples, training.micro_batch_size * EVALUATION_FACTOR, accumulate=1, micro_batch_tokens=tokens)
