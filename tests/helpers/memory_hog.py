"""A model that runs out of memory: on one rank, in one phase, as long as its micro-batches are too large."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.models import VisionTransformer
from trainer.values import Loss


class FailsInBackward(torch.autograd.Function):
    """The identity, until its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory for this gradient")


@dataclass
class Hungry(VisionTransformer):
    """A Vision Transformer with room for ``most`` samples on ``rank``, from its ``after``-th micro-batch on."""

    phase: str = "forward"
    rank: int = 0
    most: int = 10**6
    after: int = 0
    micro_batches: int = 0

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        self.micro_batches += module.training
        here = not torch.distributed.is_initialized() or torch.distributed.get_rank() == self.rank
        full = here and module.training and self.micro_batches > self.after and len(batch["labels"]) > self.most
        for loss in super().losses(module, batch):
            if full and self.phase == "forward":
                raise torch.OutOfMemoryError("no memory for these activations")
            yield dataclasses.replace(loss, total=FailsInBackward.apply(loss.total)) if full else loss
