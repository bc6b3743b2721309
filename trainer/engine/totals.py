"""The losses of a step: what each is divided by, and what they add up to. The watchdog knows this file by its name."""

from __future__ import annotations

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
        self.everybody = world_size * copies
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

    def gather(self, norm: Tensor) -> Tensor:
        """``norm`` and the losses as one vector on the device: of every micro-batch, or summed over the ranks, in a
        collective, and then how many ranks took part in it."""
        if self.everybody == 1:
            return torch.stack([norm, *chain.from_iterable(self.parts.values())])
        # In float64: thousands of samples would lose digits in float32.
        sums = [torch.stack(parts).sum(dtype=torch.float64) for parts in self.parts.values()]
        return self._over_ranks(norm, torch.stack(sums))

    def _over_ranks(self, norm: Tensor, numbers: Tensor) -> Tensor:
        """``norm``, and ``numbers`` in float64 summed over the ranks."""
        if self.everybody > 1:
            numbers = torch.cat([numbers, numbers.new_ones(1)])
            torch.distributed.all_reduce(numbers)
        return torch.cat([norm.detach().to(numbers).reshape(1), numbers])

    def must_skip(self, gathered: Tensor) -> Tensor:
        """1 on the device if what :meth:`gather` returned is not finite or lacks a rank, else 0: the ``found_inf`` of
        torch's fused optimizers, without dimensions, which DTensor takes as the same on all ranks."""
        is_fine = gathered.isfinite().all()
        if self.everybody > 1:
            is_fine &= gathered[-1] == self.everybody
        return is_fine.logical_not().to(torch.float32)

    def read(self, gathered: Tensor, arrived: torch.cuda.Event | None = None) -> tuple[float, dict[str, float]]:
        """The norm, and the mean of every loss over the whole batch: the one host sync of a step. ``gathered`` may be
        on its way to pinned memory until ``arrived``."""
        if arrived is not None:
            arrived.synchronize()
        norm, *numbers = gathered.tolist()
        # NCCL says nothing of a collective that was aborted while a rank waited.
        if self.everybody > 1 and numbers.pop() != self.everybody:
            raise RuntimeError("the ranks did not all come to the end of the step: its collectives were aborted")
        left = (number / self.copies for number in numbers)
        sums = zip(self.weights.items(), self._counts(), strict=True)
        return norm, {name: sum(islice(left, count)) / (weight or 1.0) for (name, weight), count in sums}

    def _counts(self) -> list[int]:
        """How many numbers each loss is the sum of."""
        return [1 if self.everybody > 1 else len(parts) for parts in self.parts.values()]


class TotalsInOrder(LossTotals):
    """Adds the losses of all ranks in the order of the micro-batches: the same bits on any number of ranks.

    Gradients are summed over the ranks, not averaged, so each starts from 1 / weight: a factor of the number of ranks
    would be taken back exactly only where nothing is denormal.
    """

    def __init__(self, window: Window, world_size: int, copies: int = 1) -> None:
        super().__init__(window, world_size, copies)
        self.factor = 1

    def gather(self, norm: Tensor) -> Tensor:
        own = torch.stack([torch.stack(parts) for parts in self.parts.values()]).double()
        places = own.new_zeros(*own.shape, self.world_size)  # each is filled by one rank: adding zeros rounds nothing
        places[..., torch.distributed.get_rank() if self.world_size > 1 else 0] = own
        return self._over_ranks(norm, places.flatten())

    def _counts(self) -> list[int]:
        return [len(parts) * self.world_size for parts in self.parts.values()]
