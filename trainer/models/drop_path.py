"""Drop path (stochastic depth) with draws per sample, which do not depend on how a batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import stochastic_depth

# Constants of SplitMix64 (Steele et al. 2014), as signed integers, because torch has no unsigned ones.
_UNSIGNED = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SPLITMIX_GAMMA, FIRST, SECOND = (number - 2**64 for number in _UNSIGNED)


class DropPath(nn.Module):
    """Drops a residual branch per sample at ``rate`` and scales kept ones by 1 / (1 - ``rate``) (Huang et al. 2016).

    :func:`sample_drop_paths` chooses the samples. In a loop that does not call it, torchvision draws.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.kept: Tensor | None = None  # one factor per sample; a tensor, so that all blocks share compiled code

    def forward(self, branch: Tensor) -> Tensor:
        """Drop samples of ``branch``, shape (n, ...)."""
        if not self.training:
            return branch
        if self.kept is None:
            return stochastic_depth(branch, self.rate, "row")
        return branch * self.kept.to(branch.dtype).view(-1, *[1] * (branch.ndim - 1))


def add_drop_path(blocks: Sequence[Any], rate: float) -> None:
    """Add drop path to both branches of torchvision's blocks, at rates from 0 to ``rate`` as timm; names stay."""
    for number, block in enumerate(blocks):
        own = rate * number / (len(blocks) - 1)
        block.dropout = nn.Sequential(block.dropout, DropPath(own))
        block.mlp[-1] = nn.Sequential(block.mlp[-1], DropPath(own))


def sample_drop_paths(module: nn.Module, seeds: Tensor) -> None:
    """Draw which branches each :class:`DropPath` drops for the samples with these ``seeds``, int64 ``(n,)``.

    A draw depends only on seed and position in the module. It stays until the next call, for recomputation in backward.
    """
    parts = [part for part in module.modules() if isinstance(part, DropPath)]
    numbers = torch.arange(len(parts), dtype=torch.float64, device=seeds.device).div(2).floor()[:, None]
    rates = parts[-1].rate * numbers / numbers[-1]  # on the device: a copy from the host would be a sync
    kept = (uniform(seeds, len(parts)) >= rates) / (1 - rates)
    for part, own in zip(parts, kept.unbind(), strict=True):
        part.kept = own


def uniform(seeds: Tensor, count: int) -> Tensor:
    """Return ``count`` numbers in [0, 1) per seed, int64 ``(n,)``, as float64 ``(count, n)``, by SplitMix64."""
    state = seeds + SPLITMIX_GAMMA * torch.arange(1, count + 1, device=seeds.device)[:, None]
    for shift, factor in ((30, FIRST), (27, SECOND)):
        state = (state ^ _shifted(state, shift)) * factor
    return _shifted(state ^ _shifted(state, 31), 11).double() * 2.0**-53


def _shifted(state: Tensor, by: int) -> Tensor:
    return (state >> by) & (2 ** (64 - by) - 1)
