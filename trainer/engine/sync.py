"""When gradients are synchronised over the ranks: on the last micro-step of a window, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer.contract import Model
from trainer.engine.window import Window
from trainer.errors import RunError

BUCKET = 25 * 2**20  # bytes of gradients that one collective reduces: DDP's default


class GradientSync:
    """One process: nothing to synchronise. The base class of all other ways."""

    applied = False  # the weights have been updated already when the norm is known: such a step cannot be skipped
    overlapped = False  # gradients are reduced while backward goes on, which a first step has found to be possible
    in_order = False  # the ranks' gradients and losses are summed, not averaged, in the order of the micro-batches

    def __init__(self, parameters: Sequence[Tensor], model: Model | None = None) -> None:
        self.parameters = list(parameters)
        self.may_overlap = model is not None and len(model.loss_names) == 1 and not model.conditional
        self.alike = len({(p.device, p.dtype, type(p)) for p in self.parameters}) == 1

    def begin(self, window: Window) -> None:
        """Called before the first micro-step of a window."""

    def before(self, is_last: bool) -> None:
        """Called before the forward of every micro-step: a wrapper's own state is never trusted."""

    def before_last_backward(self) -> None:
        """Called before the last backward of a window: a gradient that arrives there is complete."""

    def after(self) -> None:
        """Called after the last backward of a window."""

    def clip(self, norm: Tensor, largest: float | None) -> None:
        """Scale the gradients, which have this ``norm``, down to ``largest`` if they exceed it."""
        if largest is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, largest, norm)

    def skip(self) -> None:
        """Called in the place of the optimizer's step: no weight may have moved."""

    def abandon(self) -> None:
        """Forget what a window has left behind so far."""

    def overlap(self) -> None:
        """Reduce while backward goes on, where that waits for a first step: an earlier start of the run took it."""
        self.overlapped = self.may_overlap

    @staticmethod
    def on_gradient(parameter: Tensor, method: Callable[..., None], *arguments: Any) -> None:
        """Call a bound ``method`` with ``arguments`` and the parameter whenever its gradient has been accumulated. The
        hook does not refer to the method's object: torch never frees a parameter whose hook leads back to it."""
        weak = WeakMethod(method)
        parameter.register_post_accumulate_grad_hook(lambda p: (bound := weak()) and bound(*arguments, p))

    def norm(self) -> Tensor:
        """The norm of the gradients of the whole batch: the same on all ranks. A scalar."""
        return total_norm([p.grad for p in self.parameters if p.grad is not None], self.alike)


class ReplicatedSync(GradientSync):
    """DDP: the gradients are reduced when the last backward is done, exact whichever parameters a loss reaches.

    DDP's own buckets fire once a backward and wait for every parameter in them, while backward goes on. With several
    losses a micro-batch, or one that leaves parameters out, some would keep the gradient of their own rank. So they are
    left to it only where gradients ``may_overlap``, and a first step has reached every parameter on every rank.
    """

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[Tensor], model: Model) -> None:
        super().__init__(parameters, model)
        self.module = module

    def begin(self, window: Window) -> None:
        # Every step starts with the buffers of the first rank, whatever forwards came before it.
        self.module.require_forward_param_sync = True

    def before(self, is_last: bool) -> None:
        # What DDP.no_sync() sets; the context manager would also restore a state that nobody here relies on.
        self.module.require_backward_grad_sync = is_last and self.overlapped

    def after(self) -> None:
        if self.overlapped:
            self._require_reduced()
            return
        reached_by = add_missing(self.parameters)
        # A parameter that no rank reached keeps grad=None, as in one process: the optimizer must not decay it.
        begin_mean([p.grad for p in self.parameters if p.grad is not None])()
        self.overlapped = self.may_overlap and min(reached_by) == torch.distributed.get_world_size()

    def _require_reduced(self) -> None:
        """Check that every bucket was reduced: DDP itself would notice in the next step, after a wrong update."""
        try:
            self.module._check_reducer_finalized()
        except RuntimeError as error:
            raise RunError(
                "some parameters got no gradient from the last micro-batch, so DDP did not reduce all gradients: set "
                "`conditional = True` in the model's class, which reduces them after the last backward instead"
            ) from error


class ShardedSync(GradientSync):
    """FSDP reduces each block's gradients to shards while backward goes on: ``every_micro_step`` (then no rank keeps
    whole gradients), or in the last. ``replicas`` ranks hold each shard."""

    def __init__(
        self, module: FSDPModule, parameters: Sequence[Tensor], every_micro_step: bool = False, replicas: int = 1
    ) -> None:
        super().__init__(parameters)
        self.module, self.every_micro_step, self.replicas = module, every_micro_step, replicas

    def before(self, is_last: bool) -> None:
        self.module.set_requires_gradient_sync(is_last or self.every_micro_step)
        self.module.set_is_last_backward(is_last or self.every_micro_step)

    def norm(self) -> Tensor:
        """As for any parameters, from the shards of all ranks."""
        shards = [p.grad.to_local() for p in self.parameters if isinstance(p.grad, DTensor)]
        return norm_over_ranks(total_norm(shards, self.alike), self.replicas)


@torch.no_grad()
def ranks_that_reached(reached: Sequence[bool], device: torch.device) -> list[int]:
    """For each parameter, how many ranks have a gradient for it."""
    counts = torch.tensor([int(one) for one in reached], device=device)
    torch.distributed.all_reduce(counts)
    return counts.tolist()


def add_missing(parameters: Sequence[Tensor], *facts: bool) -> list[int]:
    """Give zeros as gradient to parameters that only other ranks have reached. Returns how many ranks have reached each
    parameter, and then on how many each of ``facts`` is true."""
    counts = ranks_that_reached([*(p.grad is not None for p in parameters), *facts], parameters[0].device)
    for parameter, count in zip(parameters, counts, strict=False):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return counts


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The positions of ``tensors`` in buckets, as DDP makes them: of one device and dtype, a sparse tensor alone."""
    given = [t._values() if t.is_sparse else t for t in tensors], [BUCKET], [t.is_sparse for t in tensors]
    return torch.distributed._compute_bucket_assignment_by_size(*given)[0] if tensors else []


def begin_mean(tensors: Sequence[Tensor], group: torch.distributed.ProcessGroup | None = None) -> Callable[[], None]:
    """Start to replace every tensor by its mean over the ranks of ``group``, by default all, in place: one collective
    for each bucket. All ranks give tensors of the same shapes and dtypes in the same order. The result waits for it."""
    works: list[Any] = []
    for first, *others in buckets(tensors):
        if others:
            with torch.distributed._coalescing_manager(group, async_ops=True) as work:
                for position in (first, *others):
                    torch.distributed.all_reduce(tensors[position], group=group)
            works.append(work)
        else:  # one that may be sparse, and that gloo would copy
            works.append(torch.distributed.all_reduce(tensors[first], group=group, async_op=True))

    def finish() -> None:
        for work in works:
            work.wait()
        if works:
            torch._foreach_div_(list(tensors), torch.distributed.get_world_size(group))

    return finish


@torch.no_grad()
def norm_over_ranks(local: Tensor, replicas: int = 1, group: torch.distributed.ProcessGroup | None = None) -> Tensor:
    """The norm of gradients whose shards are each on ``replicas`` ranks, from this rank's ``local`` norm. ``group`` (by
    default all ranks) must be able to reduce tensors on the device of ``local``."""
    square = local.double().square()
    torch.distributed.all_reduce(square, group=group)
    return (square / replicas).sqrt().to(local.dtype)


def total_norm(gradients: list[Tensor], alike: bool) -> Tensor:
    """The norm of all gradients together: ``get_total_norm``, at half its cost where all are of one device and type."""
    # torch 2.11 knows no norm of a sparse tensor; that of its values is the same, once each stands there once.
    gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not alike or not gradients:
        return nn.utils.get_total_norm(gradients, error_if_nonfinite=False)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def reshard(module: nn.Module) -> None:
    """Free whole weights that an evaluation left behind under FSDP: the optimizer must find shards."""
    if isinstance(module, FSDPModule):
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def gradient_sync(
    module: nn.Module, model: Model, parameters: Sequence[Tensor], every_micro_step: bool = False, replicas: int = 1
) -> GradientSync:
    """The way to synchronise the gradients of ``module``, as the strategy wrapped it; the rest is for FSDP alone."""
    if isinstance(module, FSDPModule):
        return ShardedSync(module, parameters, every_micro_step, replicas)
    if not isinstance(module, DistributedDataParallel):
        return GradientSync(parameters)
    return ReplicatedSync(module, parameters, model)
