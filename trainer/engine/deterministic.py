"""``run.deterministic``: gradients, norms and losses that have the same bits on 1, 2, 4, 8, ... ranks.

The batch is cut as for one rank, and rank r takes every ranks-th micro-batch from r on, so that the micro-batches of
one micro-step are neighbours. Their gradients are summed over the ranks after every micro-step, along a binary tree,
and the sums of the micro-steps along the rest of that tree: see ``tree``. Each rank keeps its part of these sums only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.engine.reproducible_norm import reproducible_norm
from trainer.engine.sync import GradientSync
from trainer.engine.tree import PartialSums, tree_reduce_scatter
from trainer.engine.window import Window
from trainer.errors import RunError, require

BUCKET = 2**23
"""Elements of gradients that are sent at once, if no gradient is larger: 32 MB in fp32."""


class TreeSync(GradientSync):
    """One rank: sums the gradients of micro-batches along the tree. The base class of the others.

    Args:
        parameters: those that train.
        world_size: ranks, a power of two.
    """

    in_order = True
    sharded = False
    """Whether gradients are shards."""

    def __init__(self, parameters: Sequence[Tensor], world_size: int = 1) -> None:
        super().__init__(parameters)
        self.world_size, self.sums = world_size, PartialSums()
        self.micro_steps = 0
        self.leaves: Sequence[bool] = ()  # which micro-batches of the batch, and of the micro-step, are not empty
        self.present: Sequence[bool] = ()
        self.reached: list[Tensor] = []

    def begin(self, window: Window) -> None:
        self.sums.clear()
        self.leaves, self.micro_steps = window.present, 0

    def before(self, is_last: bool) -> None:
        if self.micro_steps:
            self._add()
        self.present = self.leaves[self.micro_steps * self.world_size :][: self.world_size]
        self.micro_steps += 1

    @torch.no_grad()
    def after(self) -> None:
        self._add()
        total = self.sums.total()
        if total is not None:
            self._give(total)

    def abandon(self) -> None:
        self.sums.clear()

    def norm(self) -> Tensor:
        """In the type of the gradients, the same bits however they are sharded."""
        gradients = [p.grad for p in self.reached if p.grad is not None]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        elements = sum(gradient.numel() for gradient in gradients)
        device = parts[0].device if parts else self.parameters[0].device
        norm = reproducible_norm(parts, elements, device, over_ranks=self.sharded and self.world_size > 1)
        return norm.to(parts[0].dtype) if parts else norm

    @torch.no_grad()
    def _add(self) -> None:
        """Take the gradients of a micro-step out of the parameters, and to the tree."""
        reached = [p for p in self.parameters if p.grad is not None]
        if not self.reached:
            self.reached = reached
            self._prepare()
        if len(reached) != len(self.reached) or any(a is not b for a, b in zip(reached, self.reached, strict=True)):
            raise RunError(
                "run.deterministic=true: a micro-batch gave gradients to other parameters than the first one did, and "
                "the ranks sum in step: use run.deterministic false, or a model that uses all of them in every batch"
            )
        self.sums.add(self._take() if any(self.present) else None)
        for parameter in reached:
            parameter.grad = None

    def _prepare(self) -> None:
        """Called once it is known which parameters get gradients."""

    def _take(self) -> list[Tensor]:
        """This rank's part of what the micro-step gave to the parameters, summed over the ranks."""
        return [p.grad for p in self.reached if p.grad is not None]

    def _give(self, node: list[Tensor]) -> None:
        """Make what ``_take`` returned, of all micro-steps, the gradients."""
        for parameter, gradient in zip(self.reached, node, strict=True):
            parameter.grad = gradient


class ReplicatedTreeSync(TreeSync):
    """The same weights on every rank. Each sums its part of every bucket, and they are gathered once a step."""

    def _prepare(self) -> None:
        self.buckets: list[list[Tensor]] = []
        for parameter in self.reached:
            if not self.buckets or not _fits(parameter, self.buckets[-1]):
                self.buckets.append([])
            self.buckets[-1].append(parameter)

    def _take(self) -> list[Tensor]:
        shards = []
        for bucket in self.buckets:
            parts = [p.grad.reshape(-1) for p in bucket if p.grad is not None]
            padding = -sum(len(part) for part in parts) % self.world_size
            flat = torch.cat([*parts, parts[0].new_zeros(padding)])
            shards.append(tree_reduce_scatter(flat, self.present).clone())  # else all of its buffer would be kept
        return shards

    def _give(self, node: list[Tensor]) -> None:
        for bucket, shard in zip(self.buckets, node, strict=True):
            whole = shard.new_empty(len(shard) * self.world_size)
            torch.distributed.all_gather_into_tensor(whole, shard)
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, part in zip(bucket, whole[: sum(sizes)].split(sizes), strict=True):
                parameter.grad = part.view(parameter.shape)


def _fits(parameter: Tensor, bucket: list[Tensor]) -> bool:
    return parameter.dtype == bucket[0].dtype and sum(p.numel() for p in bucket) + parameter.numel() <= BUCKET


class ShardedTreeSync(TreeSync):
    """FSDP reduces each block's gradients to shards while backward goes on, in every micro-step, along the tree.

    Args:
        module: after ``fully_shard``, on all ranks.
        parameters: those that train, sharded.
        world_size: ranks.
    """

    sharded = True

    def __init__(self, module: FSDPModule, parameters: Sequence[Tensor], world_size: int) -> None:
        super().__init__(parameters, world_size)
        self.module, self.comm = module, TreeReduceScatter()
        self.gradients: list[DTensor] = []  # of the last micro-step
        for part in module.modules():  # type: ignore[attr-defined]
            if isinstance(part, FSDPModule):
                part.set_custom_reduce_scatter(self.comm)
                part.set_gradient_divide_factor(1.0)  # a sum, not a mean
                part.set_force_sum_reduction_for_comms(True)  # else NCCL would be asked to multiply by 1

    def before(self, is_last: bool) -> None:
        super().before(is_last)
        self.comm.present = self.present
        self.module.set_requires_gradient_sync(True)
        self.module.set_is_last_backward(True)

    def _take(self) -> list[Tensor]:
        self.gradients = [p.grad for p in self.reached if isinstance(p.grad, DTensor)]
        return [gradient.to_local() for gradient in self.gradients]

    def _give(self, node: list[Tensor]) -> None:
        # DTensor.from_local would move the shards of offloaded parameters to the device.
        for parameter, gradient, shard in zip(self.reached, self.gradients, node, strict=True):
            parameter.grad = gradient
            gradient.to_local().copy_(shard)
        self.gradients = []


class TreeReduceScatter(ReduceScatter):
    """What FSDP calls in the place of a reduce-scatter, which would add in an order of its own."""

    present: Sequence[bool] = ()
    """Which ranks have a micro-batch in this micro-step that is not empty."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Give this rank its part of the sum over ``group``, on the current stream."""
        if any(self.present):  # else nobody looks at the output
            output_tensor.copy_(tree_reduce_scatter(input_tensor, self.present, group))


def tree_sync(module: nn.Module, parameters: Sequence[Tensor], world_size: int) -> TreeSync:
    """The way to sum the gradients of ``module``, sharded or the same on every rank, without DDP around it.

    Raises:
        RecipeError: when it has layers whose state depends on which rank saw what.
    """
    require(
        not any(isinstance(part, _BatchNorm) and part.track_running_stats for part in module.modules()),
        "run.deterministic=true: the model has BatchNorm, whose running statistics are those of the micro-batches that "
        "one rank has seen: use run.deterministic false, or a model with another norm",
    )
    if isinstance(module, FSDPModule):
        return ShardedTreeSync(module, parameters, world_size)
    return (ReplicatedTreeSync if world_size > 1 else TreeSync)(parameters, world_size)
