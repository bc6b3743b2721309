"""BatchNorm with gradient accumulation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormStatistics:
    """Makes k micro-steps move the running statistics exactly as far as one step over the whole batch.

    Each update keeps a share (1 - m) of the running mean. With k updates per step, the momentum
    m' = 1 - (1 - m)^(1/k) keeps (1 - m')^k = 1 - m per step, as in the whole-batch run. Activations are still
    normalised with the statistics of their micro-batch; accumulation cannot change that. Without BatchNorm layers in
    ``module``, all methods do nothing.
    """

    def __init__(self, module: nn.Module, correct_momentum: bool = True) -> None:
        self.correct_momentum = correct_momentum
        self.layers = [(layer, layer.momentum) for layer in module.modules() if isinstance(layer, _BatchNorm)]
        self.before: list[Tensor] = []

    @property
    def buffers(self) -> list[Tensor]:
        return [buffer for layer, _ in self.layers for buffer in layer.buffers()]

    def set_momentum(self, micro_steps: int, is_empty: bool) -> None:
        """Set the momentum for one of ``micro_steps``; an empty one must not change the statistics."""
        for layer, momentum in self.layers:
            if is_empty:
                layer.momentum = 0.0
            elif momentum is None or not self.correct_momentum:  # None is a cumulative average: no correction needed
                layer.momentum = momentum
            else:
                layer.momentum = 1 - (1 - momentum) ** (1 / micro_steps)

    def save(self) -> None:
        """Save the running statistics before a step."""
        self.before = [buffer.clone() for buffer in self.buffers]

    def restore(self) -> None:
        """Restore the running statistics after a skipped step."""
        for buffer, value in zip(self.buffers, self.before, strict=True):
            buffer.copy_(value)

    def broadcast(self) -> None:
        """Broadcast the statistics of the first rank, as DDP does before a forward, so that evaluations agree."""
        for buffer in self.buffers:
            torch.distributed.broadcast(buffer, 0)
