"""The losses of a step: what each is divided by, and what they add up to. The watchdog knows this file by its name."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

import torch
from torch import Tensor

from trainer.engine.window import Window
from trainer.values import Loss


class LossTotals:
    """Sums up the losses of one window, on the device."""

    def __init__(self, window: Window, world_size: int, copies: int = 1) -> None:
        """``world_size`` ranks share the batch; each share is on ``copies`` ranks, which are tensor parallel."""
        self.weights, self.world_size, self.factor, self.copies = window.weights, world_size, world_size, copies
        self.parts: dict[str, list[Tensor]] = {name: [] for name in window.weights}
        self.scales: dict[str, Tensor] = {}

    def scale(self, loss: Loss, is_empty: bool) -> Tensor:
        """Where backward starts from: ranks / weight of the batch (DDP takes the mean over ranks), or 0.

        The same gradient as backward of loss × scale, with three operations less.
        """
        if loss.name not in self.scales:
            weight = self.weights[loss.name] or 1.0
            self.scales[loss.name] = torch.full_like(loss.total.detach(), self.factor / weight)
        scale = self.scales[loss.name]
        return torch.zeros_like(scale) if is_empty else scale

    def add(self, loss: Loss, is_empty: bool) -> None:
        """Count a loss of one micro-batch; one of an empty micro-batch counts nothing."""
        total = loss.total.detach()
        self.parts[loss.name].append(torch.zeros_like(total) if is_empty else total)

    def read(self, norm: Tensor) -> tuple[float, dict[str, float]]:
        """``norm`` and the mean of every loss over the whole batch: the one host sync of a step."""
        if self.world_size * self.copies > 1:  # in float64: thousands of samples would lose digits in float32
            sums = [torch.stack(parts).sum(dtype=torch.float64) for parts in self.parts.values()]
            first, values = self._over_ranks(norm, torch.stack(sums))
        else:
            first, *numbers = torch.stack([norm, *chain.from_iterable(self.parts.values())]).tolist()
            left = iter(numbers)
            values = [sum(islice(left, len(parts))) for parts in self.parts.values()]
        return first, self._means(values)

    def _over_ranks(self, norm: Tensor, numbers: Tensor) -> tuple[float, list[float]]:
        """``norm``, and ``numbers`` in float64 summed over the ranks, each share of the batch once."""
        numbers, everybody = torch.cat([numbers, numbers.new_ones(1)]), self.world_size * self.copies
        if everybody > 1:
            torch.distributed.all_reduce(numbers)
        first, *values, ranks = torch.cat([norm.detach().to(numbers).reshape(1), numbers]).tolist()
        if ranks != everybody:  # NCCL says nothing of a collective that was aborted while a rank waited
            raise RuntimeError("the ranks did not all come to the end of the step: its collectives were aborted")
        return first, [value / self.copies for value in values]

    def _means(self, sums: Iterable[float]) -> dict[str, float]:
        return {name: value / (weight or 1.0) for (name, weight), value in zip(self.weights.items(), sums, strict=True)}


class TotalsInOrder(LossTotals):
    """Adds the losses of all ranks in the order of the micro-batches: the same bits on any number of ranks.

    Gradients are summed over the ranks, not averaged, so each starts from 1 / weight: a factor of the number of ranks
    would be taken back exactly only where nothing is denormal.
    """

    def __init__(self, window: Window, world_size: int, copies: int = 1) -> None:
        super().__init__(window, world_size, copies)
        self.factor = 1

    def read(self, norm: Tensor) -> tuple[float, dict[str, float]]:
        own = torch.stack([torch.stack(parts) for parts in self.parts.values()]).double()
        places = own.new_zeros(*own.shape, self.world_size)  # each is filled by one rank: adding zeros rounds nothing
        places[..., torch.distributed.get_rank() if self.world_size > 1 else 0] = own
        first, values = self._over_ranks(norm, places.flatten())
        left = iter(values)
        return first, self._means(sum(islice(left, places[0].numel())) for _ in self.parts)
