"""The forward pass of a model as a strategy wrapped it, in the precision of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import Precision
from torch import nn

from trainer.contract import Loss, Model


class Forward:
    """Computes losses.

    The module is called as the strategy wrapped it, without Fabric's own wrapper, and precision is applied here: the
    same operations for less time per micro-step (see benchmarks/overhead.py).

    Args:
        fabric: launched; gives device, precision and strategy.
        model: gives the losses.
        module: what ``fabric.setup_module`` returned.
    """

    def __init__(self, fabric: Fabric, model: Model, module: nn.Module) -> None:
        self.model, self.device, self.precision = model, fabric.device, fabric.strategy.precision
        self.use(module)
        self.has_context = type(self.precision).forward_context is not Precision.forward_context
        self.to_device = fabric.to_device if self.device.type != "cpu" else _as_it_is

    def use(self, module: nn.Module) -> None:
        """Compute with ``module`` from now on."""
        self.module: nn.Module = getattr(module, "_forward_module", module)

    def losses(self, batch: Any) -> Iterator[Loss]:
        """The model's losses, computed under the precision's context and handed out outside of it."""
        losses = self.model.losses(self.module, self.precision.convert_input(self.to_device(batch)))
        return self._in_context(losses) if self.has_context else losses

    def _in_context(self, losses: Iterator[Loss]) -> Iterator[Loss]:
        while True:
            with self.precision.forward_context():
                loss = next(losses, None)
            if loss is None:
                return
            yield loss


def _as_it_is(batch: Any) -> Any:
    return batch
