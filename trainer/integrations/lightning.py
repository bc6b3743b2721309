"""Exact accumulated gradients in Lightning's own ``Trainer``."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DistributedSampler


class ExactAccumulation:
    """Mixin for ``LightningModule``: a step's gradient is that of its whole batch.

    ``class Exact(ExactAccumulation, LightningModule)``, whose ``training_step`` returns ``self.share(total, weight)``.

    Raises:
        ValueError: at the start of training, if the strategy, the sampler or a BatchNorm prevents exact gradients.
    """

    window_weight: Any = None

    def share(self: Any, total: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch: a sum over items with their number, or the sum of their weights."""
        self.window_weight = (0 if self.window_weight is None else self.window_weight) + weight
        return total * self.trainer.accumulate_grad_batches  # Lightning divides by it

    def on_train_start(self: Any) -> None:
        """Reject what cannot be exact."""
        trainer, sampler = self.trainer, self.trainer.train_dataloader.sampler
        if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy) or not self.automatic_optimization:
            raise ValueError("strategy: use 'auto' on one device or 'ddp', with automatic optimization")
        is_cut = trainer.accumulate_grad_batches * trainer.world_size > 1
        if is_cut and any(isinstance(module, _BatchNorm) and module.training for module in self.modules()):
            raise ValueError("BatchNorm normalizes each micro-batch by itself: use GroupNorm, or freeze it with eval()")
        if isinstance(sampler, DistributedSampler) and sampler.total_size > len(sampler.dataset):  # type: ignore[arg-type]
            raise ValueError("use_distributed_sampler: it repeats samples: set it to False and pass a batch_sampler")
        if len({*self.all_gather(torch.tensor(trainer.num_training_batches)).flatten().tolist()}) > 1:
            raise ValueError("train_dataloader: ranks have unequal numbers of micro-batches: pass a batch_sampler")

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        """Divide the sum of the window's gradients by its weight over all ranks."""
        if self.window_weight is None:
            raise ValueError("training_step: return self.share(total, weight)")
        own = torch.as_tensor(self.window_weight, dtype=torch.float64, device=self.device)
        weight, self.window_weight = float(self.trainer.strategy.reduce(own, reduce_op="sum")), None
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= self.trainer.world_size / (weight or 1.0)  # DDP takes the mean over the ranks
