"""Which samples make step s of epoch e: a pure function of (seed, epoch, size), so that resuming is arithmetic."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from trainer.values import Chances, Groups, Mixing


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2^63) from integers such as (seed, epoch, step, position); unequal parts give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> torch.Tensor:
    """The order of the ``size`` training samples in ``epoch``: int64, shape ``(size,)``."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(derive_seed(seed, epoch)))


@lru_cache(maxsize=2)
def draws(seed: int, epoch: int, chances: Chances) -> torch.Tensor:
    """The samples that ``epoch`` draws with replacement, one for each place: int64, as many as there are."""
    bounds = torch.as_tensor(chances.relative, dtype=torch.float64).cumsum(0)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    places = torch.rand(len(bounds), generator=generator, dtype=torch.float64) * bounds[-1]
    last = int(torch.searchsorted(bounds, bounds[-1:]))  # a product may be rounded up to the sum
    return torch.searchsorted(bounds, places, right=True).clamp(max=last)


def steps_in_epoch(size: int, batch_size: int) -> int:
    """How many batches an epoch has; the last may hold fewer than ``batch_size`` samples."""
    return -(-size // batch_size)


def batch_indices(
    seed: int,
    epoch: int,
    step: int,
    size: int,
    batch_size: int,
    groups: Groups | None = None,
    chances: Chances | None = None,
) -> list[int]:
    """The samples of the ``step``-th batch (from 0) of ``epoch``.

    With ``groups``, they stand in the order of the groups of their stretch; where the batch is of two stretches, at the
    same share of each. So a rank, whose micro-batches have their places in the batch, reads about the same groups in
    step after step. With ``chances``, each is drawn by itself, and may come again.
    """
    first, last = step * batch_size, min((step + 1) * batch_size, size)
    if chances is not None:
        return draws(seed, epoch, chances)[first:last].tolist()
    if groups is None:
        return permutation(seed, epoch, size)[first:last].tolist()
    begins = _stretches(seed, epoch, groups)[2]
    number = bisect_right(begins, first) - 1
    shares, samples = [], []
    while first < last:
        order, within = _stretch(seed, epoch, groups, number)
        begin = begins[number]
        places = order[first - begin : last - begin].sort().values
        shares.append(places.double() / len(order))
        samples.append(within[places])
        first, number = begin + len(order), number + 1
    return torch.cat(samples)[torch.cat(shares).argsort(stable=True)].tolist()


MIX, DRAWN = 1, 2  # separate the seeds of mixing, and of samples drawn with replacement, from the others


def draw_mix(
    seed: int, epoch: int, step: int, size: int, mixing: Mixing
) -> tuple[list[int], float, tuple[float, float] | None]:
    """How the ``size`` samples of a batch are mixed: the partner of each, by their places in the batch, the share that
    a sample keeps, and for CutMix the centre of what is cut (see ``Mix``): one of each for all, as timm does."""
    drawn = derive_seed(seed, epoch, step, size, MIX)
    generator = np.random.RandomState([drawn & 0xFFFFFFFF, drawn >> 32])  # the one whose numbers never change
    is_mixed, is_cut = generator.random_sample() < mixing.probability, generator.random_sample() < 0.5
    if not is_mixed:
        return list(range(size)), 1.0, None
    is_cut = mixing.cutmix > 0 and (is_cut or not mixing.mixup)
    alpha = mixing.cutmix if is_cut else mixing.mixup
    share = round(256 * generator.beta(alpha, alpha)) / 256
    partners = generator.permutation(size).tolist()
    return partners, share, tuple(generator.random_sample(2).tolist()) if is_cut else None


@lru_cache(maxsize=2)
def _stretches(seed: int, epoch: int, groups: Groups) -> tuple[list[int], list[int], list[int]]:
    """The groups of an epoch in their order, the first group of every stretch, and where each begins, in samples."""
    order, firsts, begins = permutation(seed, epoch, len(groups.sizes)).tolist(), [], []
    begin, held = 0, groups.mixed
    for number, group in enumerate(order):
        if held >= groups.mixed:
            firsts.append(number)
            begins.append(begin)
            held = 0
        held += groups.sizes[group]
        begin += groups.sizes[group]
    return order, firsts, begins


@lru_cache(maxsize=2)
def _starts(groups: Groups) -> list[int]:
    return [0, *accumulate(groups.sizes)]


@lru_cache(maxsize=4)
def _stretch(seed: int, epoch: int, groups: Groups, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of a stretch, and its samples group by group: int64, as many as it has.

    The k-th of the n shuffled samples of a group has its place at random between k / n and (k + 1) / n of the stretch,
    so every batch holds of every group what is in proportion.
    """
    (order, firsts, _), starts = _stretches(seed, epoch, groups), _starts(groups)
    own = order[firsts[number] : firsts[number + 1] if number + 1 < len(firsts) else None]
    samples = torch.cat([torch.arange(starts[group], starts[group + 1]) for group in own])
    sizes = torch.tensor([groups.sizes[group] for group in own])
    group_of = torch.repeat_interleave(sizes)
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, number))
    shuffled = torch.randperm(len(samples), generator=generator)
    shuffled = shuffled[group_of[shuffled].argsort(stable=True)]  # group by group again, each in an order of its own
    rank_in_group = torch.arange(len(samples)) - (sizes.cumsum(0) - sizes)[group_of]
    place = (rank_in_group + torch.rand(len(samples), generator=generator, dtype=torch.float64)) / sizes[group_of]
    return shuffled[place.argsort(stable=True)], samples
