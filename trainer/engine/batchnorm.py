"""BatchNorm under accumulation."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchNormMomentum:
    """Rescales BatchNorm's momentum so that k micro-steps move the running statistics as far as one step.

    A running mean keeps (1 - m) of its past at every update. Micro-steps update it k times a step;
    m' = 1 - (1 - m)^(1/k) keeps (1 - m')^k = 1 - m of it per step, as in the whole-batch run. (The statistics used to
    normalise are still those of a micro-batch: that is what BatchNorm does, and no accumulation can undo it.)
    """

    def __init__(self, module: nn.Module) -> None:
        # momentum=None is a cumulative average, which needs no correction
        self.layers = [
            (m, m.momentum) for m in module.modules() if isinstance(m, _BatchNorm) and m.momentum is not None
        ]

    def set(self, micro_steps: int, is_empty: bool) -> None:
        """Prepare a micro-step: one of ``micro_steps``, or an empty one, which must leave no trace."""
        for layer, momentum in self.layers:
            layer.momentum = 0.0 if is_empty else 1 - (1 - momentum) ** (1 / micro_steps)
