"""Choose the samples of each step as a pure function of (seed, epoch, size), so that a resumed run recomputes them."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from trainer.values import MixupConfig, SampleWeights, ShuffleGroups


def derive_seed(*parts: int) -> int:
    """Hash integers such as (seed, epoch, step, position) to a seed in [0, 2^63)."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> torch.Tensor:
    """Return the order of the ``size`` training samples in ``epoch``: int64, shape ``(size,)``."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))


@lru_cache(maxsize=2)
def weighted_draws(seed: int, epoch: int, chances: SampleWeights) -> torch.Tensor:
    """Draw the samples of ``epoch`` with replacement, as many as the training set has: int64, shape ``(size,)``."""
    bounds = torch.as_tensor(chances.weights, dtype=torch.float64).cumsum(0)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    places = torch.rand(len(bounds), generator=generator, dtype=torch.float64) * bounds[-1]
    last = int(torch.searchsorted(bounds, bounds[-1:]))  # a product above may round up to the sum
    return torch.searchsorted(bounds, places, right=True).clamp(max=last)


def batch_indices(
    seed: int,
    epoch: int,
    step: int,
    size: int,
    batch_size: int,
    groups: ShuffleGroups | None = None,
    chances: SampleWeights | None = None,
) -> list[int]:
    """Return the samples of the ``step``-th batch (from 0) of ``epoch``.

    With ``groups``, a batch is sorted by group within its block of groups. A batch that spans two blocks interleaves
    them by their relative positions. A rank always takes the same part of a batch, so it reads about the same groups in
    consecutive steps. With ``chances``, each sample is drawn independently, with replacement.
    """
    first, last = step * batch_size, min((step + 1) * batch_size, size)
    if chances is not None:
        return weighted_draws(seed, epoch, chances)[first:last].tolist()
    if groups is None:
        return permutation(seed, epoch, size)[first:last].tolist()
    begins = _shuffle_blocks(seed, epoch, groups)[2]
    number = bisect_right(begins, first) - 1
    shares, samples = [], []
    while first < last:
        order, within = _shuffle_block(seed, epoch, groups, number)
        begin = begins[number]
        places = order[first - begin : last - begin].sort().values
        shares.append(places.double() / len(order))
        samples.append(within[places])
        first, number = begin + len(order), number + 1
    return torch.cat(samples)[torch.cat(shares).argsort(stable=True)].tolist()


MIX, DRAW_SEED = 1, 2  # make the seeds of mixing, and of samples drawn with replacement, differ from all others


def draw_mix(
    seed: int, epoch: int, step: int, size: int, mixing: MixupConfig
) -> tuple[list[int], float, tuple[float, float] | None]:
    """Draw how the ``size`` samples of a batch are mixed, with one share and one centre for all, like timm.

    Return each sample's partner in the batch, the share that it keeps, and for CutMix the centre of the box. They are
    the fields of ``MixupDraw``.
    """
    drawn = derive_seed(seed, epoch, step, size, MIX)
    generator = np.random.RandomState([drawn & 0xFFFFFFFF, drawn >> 32])  # equal numbers in all versions of NumPy
    is_mixed, is_cut = generator.random_sample() < mixing.probability, generator.random_sample() < 0.5
    if not is_mixed:
        return list(range(size)), 1.0, None
    is_cut = mixing.cutmix > 0 and (is_cut or not mixing.mixup)
    alpha = mixing.cutmix if is_cut else mixing.mixup
    share = round(256 * generator.beta(alpha, alpha)) / 256
    partners = generator.permutation(size).tolist()
    return partners, share, tuple(generator.random_sample(2).tolist()) if is_cut else None


@lru_cache(maxsize=2)
def _shuffle_blocks(seed: int, epoch: int, groups: ShuffleGroups) -> tuple[list[int], ...]:
    """Return the order of the groups in ``epoch``, the first group of each block, its first sample in this order, and
    the first sample of each group in the training set.

    A block is a sequence of groups with at least ``groups.shuffle_buffer`` samples, which are shuffled together.
    """
    order, firsts, begins = permutation(seed, epoch, len(groups.sizes)).tolist(), [], []
    begin, held = 0, groups.shuffle_buffer
    for number, group in enumerate(order):
        if held >= groups.shuffle_buffer:
            firsts.append(number)
            begins.append(begin)
            held = 0
        held += groups.sizes[group]
        begin += groups.sizes[group]
    return order, firsts, begins, [0, *accumulate(groups.sizes)]


@lru_cache(maxsize=4)
def _shuffle_block(seed: int, epoch: int, groups: ShuffleGroups, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of a block, and its samples group by group: int64, one entry per sample.

    The k-th of n shuffled samples of a group gets a random position between k / n and (k + 1) / n of the block, so
    every batch has samples of every group in proportion to its size.
    """
    order, firsts, _, starts = _shuffle_blocks(seed, epoch, groups)
    own = order[firsts[number] : firsts[number + 1] if number + 1 < len(firsts) else None]
    samples = torch.cat([torch.arange(starts[group], starts[group + 1]) for group in own])
    sizes = torch.tensor([groups.sizes[group] for group in own])
    group_of = torch.repeat_interleave(sizes)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, number))
    shuffled = torch.randperm(len(samples), generator=generator)
    shuffled = shuffled[group_of[shuffled].argsort(stable=True)]  # group by group again, shuffled within each
    rank_in_group = torch.arange(len(samples)) - (sizes.cumsum(0) - sizes)[group_of]
    place = (rank_in_group + torch.rand(len(samples), generator=generator, dtype=torch.float64)) / sizes[group_of]
    return shuffled[place.argsort(stable=True)], samples
