"""The forward pass of a wrapped model in the precision of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import Precision
from torch import nn

from trainer.contract import Model, Packable, capability
from trainer.values import Loss

if TYPE_CHECKING:
    from trainer.engine.loss_check import LossCheck


class Forward:
    """Computes the losses of a ``model`` with a ``module`` that ``fabric.setup_module`` returned.

    Applying the precision here takes less time than in Fabric's own wrapper (benchmarks/overhead.py).
    """

    check: LossCheck | None = None  # checks the losses of the first steps

    def __init__(self, fabric: Fabric, model: Model, module: nn.Module) -> None:
        self.model, self.pack = model, capability(model, Packable).packed
        self.device, self.precision = fabric.device, fabric.strategy.precision
        self.set_module(module)
        self.has_context = type(self.precision).forward_context is not Precision.forward_context
        self.fabric = fabric

    def set_module(self, module: nn.Module) -> None:
        self.module: nn.Module = getattr(module, "_forward_module", module)

    def to_device(self, batch: Any) -> Any:
        """Move ``batch`` to the device of the module; the copy from pinned memory is asynchronous."""
        return batch if self.device.type == "cpu" else self.fabric.to_device(batch)

    def losses(self, batch: Any, packed: Any = None) -> Iterator[Loss]:
        """Yield the losses of ``batch``, computed in the precision's context; a loader may have ``packed`` it."""
        packed = self.pack(batch) if packed is None else packed
        return self._in_context(batch, packed) if self.has_context else self._of_model(batch, packed)

    def _of_model(self, batch: Any, packed: Any) -> Iterator[Loss]:
        losses = self.model.losses(self.module, self.precision.convert_input(self.to_device(packed)))
        return losses if self.check is None or not torch.is_grad_enabled() else self.check.checked(losses, batch)

    def _in_context(self, batch: Any, packed: Any) -> Iterator[Loss]:
        with self.precision.forward_context():
            losses = iter(self._of_model(batch, packed))
            loss = next(losses, None)
        while loss is not None:
            yield loss
            with self.precision.forward_context():
                loss = next(losses, None)
