"""The forward pass of a model as a strategy wrapped it, in the precision of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import Precision
from torch import nn

from trainer.contract import Model
from trainer.values import Loss

if TYPE_CHECKING:
    from trainer.engine.check import LossCheck


class Forward:
    """Computes the losses of a ``model`` with a ``module`` that ``fabric.setup_module`` returned: as the strategy
    wrapped it, without Fabric's own wrapper, with precision applied here, in less time (see benchmarks/overhead.py)."""

    check: LossCheck | None = None  # looks at the losses that are trained on, while it is there

    def __init__(self, fabric: Fabric, model: Model, module: nn.Module) -> None:
        self.model, self.device, self.precision = model, fabric.device, fabric.strategy.precision
        self.use(module)
        self.has_context = type(self.precision).forward_context is not Precision.forward_context
        self.fabric = fabric

    def use(self, module: nn.Module) -> None:
        """Compute with ``module`` from now on."""
        self.module: nn.Module = getattr(module, "_forward_module", module)

    def to_device(self, batch: Any) -> Any:
        """``batch`` where the module is; the copy from pinned memory is not waited for."""
        return batch if self.device.type == "cpu" else self.fabric.to_device(batch)

    def losses(self, batch: Any, packed: Any = None) -> Iterator[Loss]:
        """The model's losses, computed under the precision's context and handed out outside of it.

        Args:
            batch: collated, on the host.
            packed: what the model's ``packed`` makes of it, if a loader has done that already.
        """
        packed = self.model.packed(batch) if packed is None else packed
        return self._in_context(batch, packed) if self.has_context else self._of_model(batch, packed)

    def _of_model(self, batch: Any, packed: Any) -> Iterator[Loss]:
        losses = self.model.losses(self.module, self.precision.convert_input(self.to_device(packed)))
        return losses if self.check is None or not torch.is_grad_enabled() else self.check.each(losses, batch)

    def _in_context(self, batch: Any, packed: Any) -> Iterator[Loss]:
        with self.precision.forward_context():
            losses = iter(self._of_model(batch, packed))
            loss = next(losses, None)
        while loss is not None:
            yield loss
            with self.precision.forward_context():
                loss = next(losses, None)
