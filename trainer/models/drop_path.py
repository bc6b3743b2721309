"""Drop path (stochastic depth) whose draws belong to samples, however a batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import stochastic_depth

# Of SplitMix64 (Steele et al. 2014), as the signed integers that torch has.
STEP, FIRST, SECOND = (number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class DropPath(nn.Module):
    """Leaves out what a branch adds to a sample at a ``rate``, and scales what is kept by 1 / (1 - ``rate``) (Huang et
    al. 2016). :func:`draw_paths` says for which samples; in a loop that does not call it, torchvision draws."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.kept: Tensor | None = None  # a factor for each sample; blocks read no number, so they compile alike

    def forward(self, branch: Tensor) -> Tensor:
        """``branch`` of shape (n, ...)."""
        if not self.training:
            return branch
        if self.kept is None:
            return stochastic_depth(branch, self.rate, "row")
        return branch * self.kept.to(branch.dtype).view(-1, *[1] * (branch.ndim - 1))


def add_drop_path(blocks: Sequence[Any], rate: float) -> None:
    """Put it behind both branches of torchvision's blocks, at rates from 0 to ``rate``, as timm does; names stay."""
    for number, block in enumerate(blocks):
        own = rate * number / (len(blocks) - 1)
        block.dropout = nn.Sequential(block.dropout, DropPath(own))
        block.mlp[-1] = nn.Sequential(block.mlp[-1], DropPath(own))


def draw_paths(module: nn.Module, seeds: Tensor) -> None:
    """Draw what all :class:`DropPath` of ``module`` leave out of the samples with these ``seeds``, int64 ``(n,)``.

    A draw is a function of its sample's seed and its place in the module. It holds until the next call: a block that is
    computed again in backward leaves out the same.
    """
    parts = [part for part in module.modules() if isinstance(part, DropPath)]
    numbers = torch.arange(len(parts), dtype=torch.float64, device=seeds.device).div(2).floor()[:, None]
    rates = parts[-1].rate * numbers / numbers[-1]  # computed there: a copy from the host would be waited for
    kept = (uniform(seeds, len(parts)) >= rates) / (1 - rates)
    for part, own in zip(parts, kept.unbind(), strict=True):
        part.kept = own


def uniform(seeds: Tensor, count: int) -> Tensor:
    """``count`` numbers from 0 to 1 for each of ``seeds``, int64 ``(n,)``: float64 ``(count, n)``, by SplitMix64."""
    state = seeds + STEP * torch.arange(1, count + 1, device=seeds.device)[:, None]
    for shift, factor in ((30, FIRST), (27, SECOND)):
        state = (state ^ _shifted(state, shift)) * factor
    return _shifted(state ^ _shifted(state, 31), 11).double() * 2.0**-53


def _shifted(state: Tensor, by: int) -> Tensor:
    return (state >> by) & (2 ** (64 - by) - 1)
