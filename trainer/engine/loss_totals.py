"""Divide each loss by its weight, and sum the losses of a step. The watchdog recognises this file by its path."""

from __future__ import annotations

from itertools import chain, islice

import torch
from torch import Tensor

from trainer.engine.window import Window
from trainer.values import Loss


class LossTotals:
    """Sums the losses of a window on the device; ``copies`` ranks compute each of ``world_size`` shares of a batch."""

    def __init__(self, window: Window, world_size: int, copies: int = 1) -> None:
        self.weights, self.world_size, self.copies = window.weights, world_size, copies
        self.factor, self.ranks = world_size, world_size * copies
        self.parts: dict[str, list[Tensor]] = {name: [] for name in window.weights}
        self.scales: dict[str, Tensor] = {}

    def scale(self, loss: Loss, is_empty: bool) -> Tensor:
        """Return the initial gradient of backward: ranks / weight of the batch, or 0 for an empty micro-batch.

        The factor undoes DDP's mean over the ranks. Scaling the loss instead would take three more operations.
        """
        if loss.name not in self.scales:
            weight = self.weights[loss.name] or 1.0
            self.scales[loss.name] = torch.full_like(loss.total.detach(), self.factor / weight)
        scale = self.scales[loss.name]
        return torch.zeros_like(scale) if is_empty else scale

    def add(self, loss: Loss, is_empty: bool) -> None:
        """Add a loss of one micro-batch; add 0 for an empty one."""
        total = loss.total.detach()
        self.parts[loss.name].append(torch.zeros_like(total) if is_empty else total)

    def gather(self, norm: Tensor) -> Tensor:
        """Return ``norm`` and the losses as one vector on the device.

        With one rank, it has the loss of each micro-batch. With several, it has the sums over the ranks, and at its end
        the number of ranks that took part in the collective.
        """
        if self.ranks == 1:
            return torch.stack([norm, *chain.from_iterable(self.parts.values())])
        # Use float64: a sum over thousands of samples would lose digits in float32.
        sums = [torch.stack(parts).sum(dtype=torch.float64) for parts in self.parts.values()]
        return self._over_ranks(norm, torch.stack(sums))

    def _over_ranks(self, norm: Tensor, numbers: Tensor) -> Tensor:
        if self.ranks > 1:
            numbers = torch.cat([numbers, numbers.new_ones(1)])
            torch.distributed.all_reduce(numbers)
        return torch.cat([norm.detach().to(numbers).reshape(1), numbers])

    def must_skip(self, gathered: Tensor) -> Tensor:
        """Return ``found_inf`` for torch's fused optimizers: 1 if ``gathered`` is not finite or lacks a rank, else 0.

        It is a scalar, because DTensor takes a scalar as equal on all ranks.
        """
        is_fine = gathered.isfinite().all()
        if self.ranks > 1:
            is_fine &= gathered[-1] == self.ranks
        return is_fine.logical_not().to(torch.float32)

    def read(self, gathered: Tensor, arrived: torch.cuda.Event | None = None) -> tuple[float, dict[str, float]]:
        """Return the norm and the mean of every loss over the whole batch. This is the only host sync of a step.

        The copy of ``gathered`` to pinned memory is complete after ``arrived``.
        """
        if arrived is not None:
            arrived.synchronize()
        norm, *numbers = gathered.tolist()
        # NCCL reports no error for a collective that was aborted while a rank waited.
        if self.ranks > 1 and numbers.pop() != self.ranks:
            raise RuntimeError("not all ranks reached the end of the step: its collectives were aborted")
        left = (number / self.copies for number in numbers)
        sums = zip(self.weights.items(), self._counts(), strict=True)
        return norm, {name: sum(islice(left, count)) / (weight or 1.0) for (name, weight), count in sums}

    def _counts(self) -> list[int]:
        """Return how many of the gathered numbers belong to each loss."""
        return [1 if self.ranks > 1 else len(parts) for parts in self.parts.values()]
