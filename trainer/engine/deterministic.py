"""``run.deterministic``: gradients, norms and losses with the same bits on 1, 2, 4, 8, ... ranks.

The batch is cut as for one rank. With n ranks, rank r takes every n-th micro-batch from r on, so the micro-batches of
a micro-step are neighbours. After every micro-step their gradients are summed over the ranks along a binary tree. The
sums of the micro-steps are added along the rest of this tree, see :func:`tree_sum`. Each rank keeps only its part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.engine.loss_totals import LossTotals
from trainer.engine.sync import GradientSync
from trainer.engine.window import Window
from trainer.errors import RecipeError, RunError

BUCKET = 2**23  # max elements of gradients sent at once (32 MB in fp32), unless one gradient is larger


class DeterministicLossTotals(LossTotals):
    """Adds the losses of all ranks in the order of the micro-batches: the same bits on any number of ranks.

    Gradients are summed, so backward starts from 1 / weight: ranks / ranks would be inexact for denormal numbers.
    """

    def __init__(self, window: Window, world_size: int, copies: int = 1) -> None:
        super().__init__(window, world_size, copies)
        self.factor = 1

    def gather(self, norm: Tensor) -> Tensor:
        own = torch.stack([torch.stack(parts) for parts in self.parts.values()]).double()
        places = own.new_zeros(*own.shape, self.world_size)  # one rank fills each place; adding zeros does not round
        places[..., torch.distributed.get_rank() if self.world_size > 1 else 0] = own
        return self._over_ranks(norm, places.flatten())

    def _counts(self) -> list[int]:
        return [len(parts) * self.world_size for parts in self.parts.values()]


class TreeSync(GradientSync):
    """Sums the gradients of micro-batches along the tree. The number of ranks is a power of two."""

    loss_totals = DeterministicLossTotals

    def __init__(self, parameters: Sequence[Tensor], world_size: int = 1) -> None:
        super().__init__(parameters)
        self.world_size, self.sums, self.micro_steps = world_size, PartialSums(), 0
        self.leaves: Sequence[bool] = ()  # for each micro-batch of the batch, whether it has samples
        self.present: Sequence[bool] = ()  # the same for the current micro-step, one entry per rank
        self.reached: list[Tensor] = []

    def begin(self, window: Window) -> None:
        self.abandon()
        self.leaves, self.micro_steps = [size > 0 for size in window.sizes], 0

    def before_forward(self, is_last: bool) -> None:
        if self.micro_steps:
            self._add()
        self.present = self.leaves[self.micro_steps * self.world_size :][: self.world_size]
        self.micro_steps += 1

    @torch.no_grad()
    def after_last_backward(self) -> None:
        self._add()
        total = self.sums.total()
        if total is not None:
            self._give(total)

    def abandon(self) -> None:
        self.sums.clear()

    def norm(self) -> Tensor:
        """Return the norm in the dtype of the gradients, with the same bits for any sharding."""
        gradients = [p.grad for p in self.reached if p.grad is not None]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        elements, device = sum(g.numel() for g in gradients), (parts or self.parameters)[0].device
        over_ranks = self.world_size > 1 and any(isinstance(p, DTensor) for p in self.parameters)
        norm = reproducible_norm(parts, elements, device, over_ranks)
        return norm.to(parts[0].dtype) if parts else norm

    @torch.no_grad()
    def _add(self) -> None:
        reached = [p for p in self.parameters if p.grad is not None]
        if not self.reached:
            self.reached = reached
            self._prepare()
        if list(map(id, reached)) != list(map(id, self.reached)):
            raise RunError(
                "run.deterministic=true: a micro-batch produced gradients for different parameters than the first one: "
                "use run.deterministic false, or a model that uses all parameters in every batch"
            )
        self.sums.add(self._take() if any(self.present) else None)
        for parameter in reached:
            parameter.grad = None

    def _prepare(self) -> None:
        """Called after the first micro-step, when the parameters with gradients are known."""

    def _take(self) -> list[Tensor]:
        return [p.grad for p in self.reached if p.grad is not None]

    def _give(self, node: list[Tensor]) -> None:
        for parameter, gradient in zip(self.reached, node, strict=True):
            parameter.grad = gradient


class ReplicatedTreeSync(TreeSync):
    """Replicated weights: each rank sums its part of every bucket, and the parts are gathered once per step."""

    def _prepare(self) -> None:
        self.buckets: list[list[Tensor]] = []
        for parameter in self.reached:
            last = self.buckets[-1] if self.buckets else []
            if last and last[0].dtype == parameter.dtype and sum(p.numel() for p in (*last, parameter)) <= BUCKET:
                last.append(parameter)
            else:
                self.buckets.append([parameter])

    def _take(self) -> list[Tensor]:
        shards = []
        for bucket in self.buckets:
            parts = [p.grad.reshape(-1) for p in bucket if p.grad is not None]
            flat = torch.cat([*parts, parts[0].new_zeros(-sum(map(len, parts)) % self.world_size)])
            shards.append(tree_reduce_scatter(flat, self.present).clone())  # a view would keep the whole buffer
        return shards

    def _give(self, node: list[Tensor]) -> None:
        for bucket, shard in zip(self.buckets, node, strict=True):
            whole = shard.new_empty(len(shard) * self.world_size)
            torch.distributed.all_gather_into_tensor(whole, shard)
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, part in zip(bucket, whole[: sum(sizes)].split(sizes), strict=True):
                parameter.grad = part.view(parameter.shape)


class ShardedTreeSync(TreeSync):
    """Sharded weights: FSDP reduces each block's gradients to shards along the tree during every backward."""

    def __init__(self, module: FSDPModule, parameters: Sequence[Tensor], world_size: int) -> None:
        super().__init__(parameters, world_size)
        self.module, self.comm = module, TreeReduceScatter()
        self.gradients: list[DTensor] = []  # gradients of the last micro-step
        for part in module.modules():  # type: ignore[attr-defined]
            if isinstance(part, FSDPModule):
                part.set_custom_reduce_scatter(self.comm)
                part.set_gradient_divide_factor(1.0)  # a sum, not a mean
                part.set_force_sum_reduction_for_comms(True)  # otherwise NCCL would multiply by 1

    def before_forward(self, is_last: bool) -> None:
        super().before_forward(is_last)
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


class TreeReduceScatter(DefaultReduceScatter):
    """Replaces FSDP's reduce-scatter, whose order of additions is not defined."""

    present: Sequence[bool] = ()  # for each rank, whether its micro-batch of this micro-step has samples

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: Any = False) -> None:
        """Write this rank's part of the sum over ``group`` to the output, on the current stream."""
        if any(self.present):  # otherwise the output is not used
            output_tensor.copy_(tree_reduce_scatter(input_tensor, self.present, group))


def make_tree_sync(module: nn.Module, parameters: Sequence[Tensor], world_size: int) -> TreeSync:
    """Return the synchronisation for ``module``, which is sharded or replicated without DDP."""
    if any(isinstance(part, _BatchNorm) and part.track_running_stats for part in module.modules()):
        raise RecipeError(
            "run.deterministic=true: the model has BatchNorm, whose running statistics depend on the micro-batches of "
            "a single rank: use run.deterministic false, or a model with another norm"
        )
    if isinstance(module, FSDPModule):
        return ShardedTreeSync(module, parameters, world_size)
    return (ReplicatedTreeSync if world_size > 1 else TreeSync)(parameters, world_size)


# Sums along one binary tree, whose shape depends only on the number of leaves.
#
# Leaf i is the gradient of micro-batch i of a batch. Every inner node is the sum of the nodes 2i and 2i + 1 below it.
# If one of these is missing, the node equals the other; adding zeros would turn -0.0 into 0.0. Floating-point addition
# is commutative but not associative: the bits of a sum depend on the shape of the tree, not on which rank adds.

Node = list[Tensor] | None  # the tensors of a node; None if it has no leaves


def add_nodes(left: Node, right: Node) -> Node:
    """Add two neighbours, in the memory of one of them."""
    if not left or not right:
        return left or right
    torch._foreach_add_(left, right)
    return left


def tree_sum(leaves: Sequence[Node]) -> Node:
    """Return the root over all leaves, in the memory of one of them; the leaves are overwritten."""
    nodes = list(leaves)
    while len(nodes) > 1:
        nodes = [add_nodes(left, right) for left, right in zip_longest(nodes[::2], nodes[1::2])]
    return nodes[0]


def tree_reduce_scatter(parts: Tensor, present: Sequence[bool], group: Any = None) -> Tensor:
    """Sum over the ranks of ``group``, each one leaf of the tree; return this rank's part, of shape ``(n,)``.

    ``parts`` are the concatenated parts of this rank's leaf, of shape ``(ranks * n,)``. Only ranks that are ``present``
    have a leaf; at least one has.
    """
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    rows = received.view(len(present), -1)
    root = tree_sum([[row] if is_there else None for row, is_there in zip(rows, present, strict=True)])
    assert root is not None
    return root[0]


class PartialSums:
    """Adds a sequence of nodes of equal height in place, keeping one sum per binary one of their number."""

    def __init__(self) -> None:
        self.sums: list[tuple[int, Node]] = []  # (height, node), with decreasing heights

    def add(self, node: Node) -> None:
        height = 0
        while self.sums and self.sums[-1][0] == height:
            node = add_nodes(self.sums.pop()[1], node)
            height += 1
        self.sums.append((height, node))

    def total(self) -> Node:
        """Return the root, and empty the counter."""
        node: Node = None
        while self.sums:
            node = add_nodes(self.sums.pop()[1], node)
        return node

    def clear(self) -> None:
        self.sums.clear()


# A norm that depends neither on the order of its elements nor on their distribution over ranks. Sums of floats do,
# because each addition rounds. So squares become integers, relative to the largest element, which are added exactly
# (after Demmel and Nguyen, "Parallel Reproducible Summation", 2015, with two bins).

# Log2 of the number of elements converted at once; on a CPU, their copies in float64 then stay in the cache.
CHUNK_BITS = {"cpu": 16, "cuda": 22}
MANTISSA_BITS = 52
MIN_EXPONENT = -1000  # min exponent of the largest element: 2 ** 1000 is finite in float64


@torch.no_grad()
def reproducible_norm(parts: Sequence[Tensor], elements: int, device: torch.device, reduce: bool) -> Tensor:
    """Return the 2-norm of all elements as a float64 scalar, infinite if any element is not finite.

    Squares are rounded 2 b bits below the square of the largest element. With N elements, the relative error is at most
    N 2^(-2 b). b is 36 on a CPU and 30 on a GPU (62 - log2 N from 2^26 and 2^32 elements on): at most 1e-15 for a
    million elements on a CPU, and 1e-9 for a billion on a GPU. With ``reduce``, each rank has a part of them.
    """
    parts = [part for part in parts if part.numel()]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        largest = torch.stack(torch._foreach_norm(parts, float("inf"))).amax().double()
    largest = largest.masked_fill(~largest.isfinite(), torch.inf)  # a maximum over the ranks may lose NaN
    if reduce:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    exponent = torch.frexp(largest).exponent.clamp(min=MIN_EXPONENT)
    scale = torch.exp2(-exponent.double())  # every element times this is at most 1
    chunk_bits = CHUNK_BITS[device.type]
    bits = min(MANTISSA_BITS - chunk_bits, 62 - max(1, elements - 1).bit_length())
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for part in parts:
        for chunk in part.reshape(-1).split(2**chunk_bits):
            # Split each square times 2^bits into an integer and a fraction; scale the fraction by 2^bits and round it.
            # Both sums stay below 2^52, so float64 adds them exactly in any order, faster than as int64.
            squares = (chunk.double() * scale).square_().mul_(2.0**bits)
            high = squares.floor()
            low = squares.sub_(high).mul_(2.0**bits).round_()
            sums += torch.stack([high.sum(), low.sum()]).to(torch.int64)
            del squares, high, low  # free these large tensors before the next chunk
    if reduce:
        torch.distributed.all_reduce(sums)
    total, rest = sums.double().unbind()
    norm = ((total + rest * 2.0**-bits) * 2.0**-bits).sqrt() / scale
    return norm.masked_fill(~largest.isfinite(), torch.inf)


# The choice of kernels: run.deterministic requires those that always give the same bits.

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = ":4096:8"  # 8 buffers of 4 MiB; one of two settings that make cuBLAS deterministic
REFUSED = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Make torch use only deterministic algorithms in this context if ``wanted``; restore its settings afterwards."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    own_setting = CUBLAS not in os.environ
    os.environ.setdefault(CUBLAS, WORKSPACES)
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield
    except RuntimeError as error:
        found = REFUSED.search(str(error))
        if found is None:
            raise
        cause = f"run.deterministic=true: {found[1]} has no deterministic implementation on this device"
        raise RecipeError(f"{cause}: use run.deterministic false, or a model that does not use it") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        if own_setting:
            del os.environ[CUBLAS]
