"""When gradients are synchronised over the ranks: on the last micro-step of a window, and at no other time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.contract import Model
from trainer.errors import RunError


class GradientSync:
    """One process: nothing to synchronise."""

    applied: bool = False
    """Whether the weights are updated already when ``norm`` is known, so that the step cannot be skipped."""

    def before(self, is_last: bool) -> None:
        """Called before the forward of every micro-step: a wrapper's own state is never trusted."""

    def after(self) -> None:
        """Called after the last backward of a window."""

    def norm(self) -> Tensor:
        """The global norm of the gradients of this step, over all ranks; for gradients that are no longer there."""
        raise NotImplementedError


class OverlappedSync(GradientSync):
    """DDP reduces each bucket while backward goes on, in the micro-step that is told to."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module

    def before(self, is_last: bool) -> None:
        # What DDP.no_sync() sets; the context manager would also restore a state that nobody here relies on.
        self.module.require_backward_grad_sync = is_last

    def after(self) -> None:
        """Check that every bucket was reduced: DDP itself would notice in the next step, after a wrong update."""
        try:
            self.module._check_reducer_finalized()
        except RuntimeError as error:
            raise RunError(
                "some parameters got no gradient from the last micro-batch, so DDP did not reduce all gradients: set "
                "`conditional = True` in the model's class, which reduces them after the last backward instead"
            ) from error


class SyncAfterwards(GradientSync):
    """All gradients are reduced when the last backward is done: exact whichever parameters a loss reaches.

    DDP's buckets fire once a backward and wait for every parameter in them. With several losses a micro-batch, or one
    that leaves parameters out, some would keep the gradient of their own rank.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.all_reached = False

    def before(self, is_last: bool) -> None:
        self.module.require_backward_grad_sync = False

    def after(self) -> None:
        with torch.no_grad():
            counts = torch.tensor([int(p.grad is not None) for p in self.parameters], device=self.parameters[0].device)
            torch.distributed.all_reduce(counts)
            ranks = torch.distributed.get_world_size()
            reached_by = counts.tolist()
            self.all_reached = min(reached_by) == ranks
            # A parameter that no rank reached keeps grad=None, as in one process: the optimizer must not decay it.
            used = [p for p, count in zip(self.parameters, reached_by, strict=True) if count]
            for parameter in used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in used if p.grad is not None]
            for work in [torch.distributed.all_reduce(gradient, async_op=True) for gradient in gradients]:
                work.wait()
            torch._foreach_div_(gradients, ranks)


class OverlappedWhereAllAreReached(GradientSync):
    """The first step is reduced afterwards; if it reached every parameter on every rank, the others overlap."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = module
        self.sync: GradientSync = SyncAfterwards(module)

    def before(self, is_last: bool) -> None:
        self.sync.before(is_last)

    def after(self) -> None:
        self.sync.after()
        if isinstance(self.sync, SyncAfterwards) and self.sync.all_reached:
            self.sync = OverlappedSync(self.module)


def gradient_sync(module: nn.Module, model: Model) -> GradientSync:
    """The way to synchronise the gradients of ``module``, as the strategy wrapped it."""
    if not isinstance(module, DistributedDataParallel):
        return GradientSync()
    if len(model.loss_names) > 1 or model.conditional:
        return SyncAfterwards(module)
    return OverlappedWhereAllAreReached(module)
