"""When gradients are synchronised over the ranks: on the last micro-step of a window, and at no other time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class GradientSync:
    """One process: nothing to synchronise."""

    def before(self, is_last: bool) -> None:
        """Called before the forward of every micro-step: a wrapper's own state is never trusted."""

    def after(self) -> None:
        """Called after the last backward of a window."""


class OverlappedSync(GradientSync):
    """DDP reduces each bucket while backward goes on, in the micro-step that is told to."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module

    def before(self, is_last: bool) -> None:
        # What DDP.no_sync() sets; the context manager would also restore a state that nobody here relies on.
        self.module.require_backward_grad_sync = is_last


class SyncAfterwards(GradientSync):
    """DDP's buckets fire once a backward, so a micro-batch with several losses is reduced when all of them are done.

    With buckets, a parameter that the last loss does not reach would keep the gradient of its own rank.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def before(self, is_last: bool) -> None:
        self.module.require_backward_grad_sync = False

    def after(self) -> None:
        with torch.no_grad():
            reached = torch.tensor(
                [p.grad is not None for p in self.parameters], device=self.parameters[0].device
            ).int()
            torch.distributed.all_reduce(reached, torch.distributed.ReduceOp.MAX)
            # A parameter that no rank reached keeps grad=None, as in one process: the optimizer must not decay it.
            used = [p for p, anywhere in zip(self.parameters, reached.tolist(), strict=True) if anywhere]
            for parameter in used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in used if p.grad is not None]
            for work in [torch.distributed.all_reduce(gradient, async_op=True) for gradient in gradients]:
                work.wait()
            torch._foreach_div_(gradients, torch.distributed.get_world_size())


def gradient_sync(module: nn.Module, loss_count: int) -> GradientSync:
    """The way to synchronise the gradients of ``module``, as the strategy wrapped it."""
    if not isinstance(module, DistributedDataParallel):
        return GradientSync()
    return OverlappedSync(module) if loss_count == 1 else SyncAfterwards(module)
