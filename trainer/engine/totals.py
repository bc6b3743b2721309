"""The losses of a step: what each is divided by, and what they add up to."""

from __future__ import annotations

from itertools import chain, islice

import torch
from torch import Tensor

from trainer.contract import Loss
from trainer.engine.window import Window


class LossTotals:
    """Sums up the losses of one window, on the device.

    Args:
        window: gives the weight of every loss in the whole batch, over all ranks.
        world_size: ranks.
    """

    def __init__(self, window: Window, world_size: int) -> None:
        self.weights, self.world_size = window.weights, world_size
        self.parts: dict[str, list[Tensor]] = {name: [] for name in window.weights}
        self.scales: dict[str, Tensor] = {}

    def scale(self, loss: Loss, is_empty: bool) -> Tensor:
        """Where backward starts from: ranks / weight of the batch (DDP takes the mean over ranks), or 0.

        The same gradient as backward of loss × scale, with three operations less.
        """
        if loss.name not in self.scales:
            weight = self.weights[loss.name] or 1.0
            self.scales[loss.name] = torch.full_like(loss.total.detach(), self.world_size / weight)
        scale = self.scales[loss.name]
        return torch.zeros_like(scale) if is_empty else scale

    def add(self, loss: Loss, is_empty: bool) -> None:
        """Count a loss of one micro-batch; one of an empty micro-batch counts nothing."""
        total = loss.total.detach()
        self.parts[loss.name].append(torch.zeros_like(total) if is_empty else total)

    def read(self, norm: Tensor) -> tuple[float, dict[str, float]]:
        """``norm`` and the mean of every loss over the whole batch: the one host sync of a step."""
        if self.world_size > 1:
            # In float64: thousands of samples would lose digits in float32.
            sums = torch.stack([torch.stack(parts).sum(dtype=torch.float64) for parts in self.parts.values()])
            sums = torch.cat([sums, sums.new_ones(1)])
            torch.distributed.all_reduce(sums)
            first, *values, ranks = torch.cat([norm.detach().to(sums).reshape(1), sums]).tolist()
            if ranks != self.world_size:  # NCCL says nothing of a collective that was aborted while a rank waited
                raise RuntimeError("the ranks did not all come to the end of the step: its collectives were aborted")
        else:
            first, *numbers = torch.stack([norm, *chain.from_iterable(self.parts.values())]).tolist()
            left = iter(numbers)
            values = [sum(islice(left, len(parts))) for parts in self.parts.values()]
        weights = self.weights
        return first, {name: value / (weights[name] or 1.0) for name, value in zip(weights, values, strict=True)}
