"""BatchNorm under accumulation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormStatistics:
    """Keeps running statistics what they are in the whole-batch run: k micro-steps move them as far as one step.

    A running mean keeps (1 - m) of its past at every update. Micro-steps update it k times a step;
    m' = 1 - (1 - m)^(1/k) keeps (1 - m')^k = 1 - m of it per step, as in the whole-batch run. (The statistics used to
    normalise are still those of a micro-batch: that is what BatchNorm does, and no accumulation can undo it.)
    """

    def __init__(self, module: nn.Module, correct_momentum: bool = True) -> None:
        self.correct_momentum = correct_momentum
        self.layers = [(layer, layer.momentum) for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self.before: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for layer, _ in self.layers for buffer in layer.buffers()]

    def set(self, micro_steps: int, is_empty: bool) -> None:
        """Prepare a micro-step: one of ``micro_steps``, or an empty one, which must leave no trace."""
        for layer, momentum in self.layers:
            if is_empty:
                layer.momentum = 0.0
            elif momentum is None or not self.correct_momentum:  # None is a cumulative average, right as it is
                layer.momentum = momentum
            else:
                layer.momentum = 1 - (1 - momentum) ** (1 / micro_steps)

    def remember(self) -> None:
        """Keep the running statistics as they are before a step."""
        self.before = [buffer.clone() for buffer in self.buffers]

    def restore(self) -> None:
        """Take back what a skipped step did to them."""
        for buffer, value in zip(self.buffers, self.before, strict=True):
            buffer.copy_(value)

    def share(self) -> None:
        """Give every rank the first one's statistics, as DDP does before a forward: evaluation is the same on all."""
        for buffer in self.buffers:
            torch.distributed.broadcast(buffer, 0)
