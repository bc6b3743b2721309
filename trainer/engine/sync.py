"""Synchronise gradients over the ranks on the last micro-step of a window only."""

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
from trainer.engine.loss_totals import LossTotals
from trainer.engine.window import Window
from trainer.errors import RunError

BUCKET = 25 * 2**20  # bytes of gradients per collective; DDP's default


class GradientSync:
    """The base class; synchronises nothing, for a single process."""

    updates_in_backward = False  # whether weights are updated before the norm is known, so no step can be skipped
    overlaps_update = False  # whether gradients are reduced during backward, after a first step allowed this
    loss_totals: type[LossTotals] = LossTotals  # sums the losses of a step; must fit the reduction of gradients
    half: Sequence[Tensor] = ()  # weights of 2 bytes; their gradients are summed in fp32, as each sum in bf16 rounds

    def __init__(self, parameters: Sequence[Tensor], model: Model | None = None) -> None:
        self.parameters = list(parameters)
        self.may_overlap = model is not None and len(model.loss_names) == 1 and not model.conditional
        self.alike = len({(p.device, p.dtype, type(p)) for p in self.parameters}) == 1

    def begin(self, window: Window) -> None:
        """Called before the first micro-step of a window."""
        for parameter in self.half if len(window) > 1 else ():
            parameter.grad_dtype = torch.float32

    def before_forward(self, is_last: bool) -> None:
        """Called before every forward to set the wrapper's synchronisation, whose own state is never trusted."""

    def before_last_backward(self) -> None:
        """Called before the last backward of a window, in which gradients become complete."""

    def after_last_backward(self) -> None:
        """Called after the last backward of a window."""
        self.round_sums()

    def round_sums(self) -> None:
        """Round gradients that were summed in fp32 to the type of their weights."""
        for parameter in self.half:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def clip(self, norm: Tensor, max_norm: float | None) -> None:
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)

    def skip(self) -> None:
        """Called instead of the optimizer's step if it is skipped: no weight may have moved."""

    def abandon(self) -> None:
        """Drop the state of a window that was not completed."""

    def enable_overlap(self) -> None:
        """Reduce during backward from the first step on, because this run took a first step before it was resumed."""
        self.overlaps_update = self.may_overlap

    @staticmethod
    def on_gradient(parameter: Tensor, method: Callable[..., None], *arguments: Any) -> None:
        """Call a bound ``method`` with ``arguments`` and the parameter after each accumulation of its gradient.

        The hook has a weak reference: torch never frees a parameter whose hook refers back to it.
        """
        weak = WeakMethod(method)
        parameter.register_post_accumulate_grad_hook(lambda p: (bound := weak()) and bound(*arguments, p))

    def norm(self) -> Tensor:
        """Return the norm of the gradients of the whole batch as a scalar, equal on all ranks."""
        return total_norm([p.grad for p in self.parameters if p.grad is not None], self.alike)


class ReplicatedSync(GradientSync):
    """DDP: reduces gradients after the last backward, which is exact even if a loss does not reach all parameters.

    DDP itself reduces a bucket once per backward, so with several losses, or unused parameters, some gradients would
    stay local. Its buckets are used only if gradients ``may_overlap`` and step 1 reached every parameter on all ranks.
    """

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[Tensor], model: Model) -> None:
        super().__init__(parameters, model)
        self.module = module

    def begin(self, window: Window) -> None:
        # Every step starts with the buffers of the first rank, also after other forwards.
        self.module.require_forward_param_sync = True
        super().begin(window)

    def before_forward(self, is_last: bool) -> None:
        # Same effect as DDP.no_sync(), without restoring an earlier state, which this code does not rely on.
        self.module.require_backward_grad_sync = is_last and self.overlaps_update

    def before_last_backward(self) -> None:
        if self.overlaps_update:  # DDP's buckets have the type of the weights
            self.round_sums()

    def after_last_backward(self) -> None:
        if self.overlaps_update:
            self._require_reduced()
            return
        reached_by = add_missing(self.parameters)
        # A parameter that no rank reached keeps grad=None, as in one process, so that the optimizer does not decay it.
        begin_mean([p.grad for p in self.parameters if p.grad is not None])()
        self.round_sums()
        self.overlaps_update = self.may_overlap and min(reached_by) == torch.distributed.get_world_size()

    def _require_reduced(self) -> None:
        """Require that every bucket was reduced; DDP itself reports this one step later, after a wrong update."""
        try:
            self.module._check_reducer_finalized()
        except RuntimeError as error:
            raise RunError(
                "some parameters received no gradient from the last micro-batch, so DDP did not reduce all gradients: "
                "set `conditional = True` in the model class, to reduce them after the last backward instead"
            ) from error


class ShardedSync(GradientSync):
    """FSDP: reduces gradients to shards in the last micro-step, or in every one; ``replicas`` ranks hold each shard."""

    def __init__(
        self, module: FSDPModule, parameters: Sequence[Tensor], every_micro_step: bool = False, replicas: int = 1
    ) -> None:
        super().__init__(parameters)
        self.module, self.every_micro_step, self.replicas = module, every_micro_step, replicas

    def before_forward(self, is_last: bool) -> None:
        self.module.set_requires_gradient_sync(is_last or self.every_micro_step)
        self.module.set_is_last_backward(is_last or self.every_micro_step)

    def norm(self) -> Tensor:
        shards = [p.grad.to_local() for p in self.parameters if isinstance(p.grad, DTensor)]
        return norm_over_ranks(total_norm(shards, self.alike), self.replicas)


@torch.no_grad()
def gradient_rank_counts(reached: Sequence[bool], device: torch.device) -> list[int]:
    """Count for each parameter the ranks that have a gradient for it."""
    counts = torch.tensor([int(one) for one in reached], device=device)
    torch.distributed.all_reduce(counts)
    return counts.tolist()


def add_missing(parameters: Sequence[Tensor], *facts: bool) -> list[int]:
    """Give zeros to parameters that only other ranks reached; count the ranks that reached each, and of each fact."""
    counts = gradient_rank_counts([*(p.grad is not None for p in parameters), *facts], parameters[0].device)
    for parameter, count in zip(parameters, counts, strict=False):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return counts


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the positions of ``tensors`` into buckets like DDP: one device and dtype each, sparse tensors alone."""
    given = [t._values() if t.is_sparse else t for t in tensors], [BUCKET], [t.is_sparse for t in tensors]
    return torch.distributed._compute_bucket_assignment_by_size(*given)[0] if tensors else []


def begin_mean(tensors: Sequence[Tensor], group: torch.distributed.ProcessGroup | None = None) -> Callable[[], None]:
    """Start to replace every tensor by its mean over ``group``, in place; return a function that waits for it.

    There is one collective per bucket. All ranks must pass tensors of the same shapes and dtypes in the same order.
    """
    works: list[Any] = []
    for first, *others in buckets(tensors):
        if others:
            with torch.distributed._coalescing_manager(group, async_ops=True) as work:
                for position in (first, *others):
                    torch.distributed.all_reduce(tensors[position], group=group)
            works.append(work)
        else:  # may be sparse; gloo would copy it when coalescing
            works.append(torch.distributed.all_reduce(tensors[first], group=group, async_op=True))

    def finish() -> None:
        for work in works:
            work.wait()
        if works:
            torch._foreach_div_(list(tensors), torch.distributed.get_world_size(group))

    return finish


@torch.no_grad()
def norm_over_ranks(local: Tensor, replicas: int = 1, group: torch.distributed.ProcessGroup | None = None) -> Tensor:
    """Return the norm over ``group`` from the ``local`` norm of this rank's shards, each held by ``replicas`` ranks."""
    square = local.double().square()
    torch.distributed.all_reduce(square, group=group)
    return (square / replicas).sqrt().to(local.dtype)


def total_norm(gradients: list[Tensor], same_layout: bool) -> Tensor:
    """Return the norm of all gradients, at half the cost of ``get_total_norm`` if they have the ``same_layout``."""
    # torch 2.11 has no norm for sparse tensors. The norm of the coalesced values is the same.
    gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    if not same_layout or not gradients:
        return nn.utils.get_total_norm(gradients, error_if_nonfinite=False)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def reshard(module: nn.Module) -> None:
    """Reshard weights that an evaluation under FSDP left gathered, because the optimizer must find shards."""
    if isinstance(module, FSDPModule):
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def gradient_sync(
    module: nn.Module, model: Model, parameters: Sequence[Tensor], every_micro_step: bool = False, replicas: int = 1
) -> GradientSync:
    """Return the synchronisation for a wrapped ``module``; the last two arguments are for FSDP only."""
    if isinstance(module, FSDPModule):
        return ShardedSync(module, parameters, every_micro_step, replicas)
    sync = GradientSync(parameters)
    if isinstance(module, DistributedDataParallel):
        sync = ReplicatedSync(module, parameters, model)
    sync.half = [parameter for parameter in parameters if parameter.dtype.itemsize == 2]
    return sync
