"""Two passes for losses that compare all samples of a batch: the gradient of one pass over the whole batch.

The first pass computes the embeddings of all micro-batches without a graph. They are gathered over the ranks, and every
rank computes the loss of the batch and its gradient with respect to each embedding. The second pass repeats the forward
of each micro-batch with a graph and the same dropout, and continues backward from that gradient (GradCache, Gao et al.
2021). Memory grows with the batch only by the embeddings and by what the loss itself keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.contract import WholeBatch
from trainer.engine.forward import Forward
from trainer.engine.window import MicroBatch, Window
from trainer.errors import RecipeError, require
from trainer.values import Loss

if TYPE_CHECKING:
    from trainer.engine.loss_check import LossCheck
    from trainer.engine.step import Stepper


def first_pass(stepper: Stepper, window: Window) -> Callable[[Any, Any], Iterator[Loss]]:
    """Run the first pass; return a function that yields the loss of each micro-batch, in order, in the second pass."""
    rank, ranks = stepper.fabric.global_rank, stepper.world_size
    parts = []
    with torch.no_grad():
        for micro in window:
            stepper.phases.enter("forward", micro)
            stepper.generator.manual_seed(micro.seed)
            stepper.batchnorm.set_momentum(len(window), is_empty=True)  # the second pass updates the statistics
            parts.append(embeddings_of(stepper, micro.batch, micro.packed)[: 0 if micro.is_empty else None])
    rows, sizes = [len(part) for part in parts], [*window.sizes[rank::ranks]][: len(parts)]
    cause = f"{type(stepper.model).__name__}: embed() returns {rows} rows for micro-batches of {sizes} samples"
    require(rows == sizes, f"{cause}: return one row for each sample")
    stepper.generator.manual_seed(window.seed)  # for random numbers in the loss
    whole = gather_embeddings(parts, window.sizes, rank, ranks).requires_grad_()
    loss = cast(WholeBatch, stepper.model).loss_of_all(whole)
    if stepper.check and not stepper.check.steps:
        _require_whole(stepper.check, loss, window)
    (gradient,) = torch.autograd.grad(loss.total, whole)
    mean = loss.total.detach() / max(1, len(whole))
    gradients = iter([gradient[place] for place in own_rows(parts, window.sizes, rank, ranks)])

    def losses(batch: Any, packed: Any) -> Iterator[Loss]:
        embeddings, upstream = embeddings_of(stepper, batch, packed), next(gradients)
        share = mean * len(upstream)
        upstream = upstream if len(upstream) else torch.zeros_like(embeddings)  # a rank without samples
        linked = Loss(_Continued.apply(embeddings, upstream, share), stepper.model.weigh(batch)[loss.name], loss.name)
        yield from stepper.check.checked([linked], batch) if stepper.check else [linked]

    return losses


class _Continued(torch.autograd.Function):
    """Returns ``value``, a share of the loss of the batch, whose gradient for the embeddings is known."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * scale, None, None


def embeddings_of(forward: Forward, batch: Any, packed: Any) -> Tensor:
    """Return the embeddings of a micro-batch, computed in the precision's context, in fp32 or wider."""
    packed = forward.pack(batch) if packed is None else packed
    with forward.precision.forward_context():
        inputs = forward.precision.convert_input(forward.to_device(packed))
        found = cast(WholeBatch, forward.model).embed(forward.module, inputs)
    return found.float() if found.dtype.itemsize == 2 else found


def own_rows(parts: Sequence[Tensor], sizes: Sequence[int], rank: int, ranks: int) -> list[slice]:
    """Return the rows of this rank's ``parts`` in the batch. It has every ``ranks``-th micro-batch of ``sizes``."""
    starts = [0, *accumulate(sizes)][rank::ranks]
    return [slice(start, start + len(part)) for start, part in zip(starts, parts, strict=False)]


def gather_embeddings(parts: Sequence[Tensor], sizes: Sequence[int], rank: int, ranks: int) -> Tensor:
    """Return the embeddings of all micro-batches of all ranks, in the order of ``sizes``."""
    whole = parts[0].new_zeros(sum(sizes), *parts[0].shape[1:])
    for rows, part in zip(own_rows(parts, sizes, rank, ranks), parts, strict=True):
        whole[rows] = part
    if ranks > 1:
        torch.distributed.all_reduce(whole)  # one rank fills each row, and adding zeros does not round
    return whole


def _require_whole(check: LossCheck, loss: Any, window: Window) -> None:
    """Require in the first step that the loss of a batch is a sum over its samples, with the sum of their weights."""
    check.require_loss(loss)
    weights = f"{check.kind}: weigh() returns {window.weights} for this batch"
    require([*window.weights] == [loss.name], f"{weights}, but loss_of_all() {loss.name!r}: use the same name")
    counts = sum(window.sizes) == window.samples  # otherwise a trial of the peak
    if counts and not math.isclose(weight := float(loss.counted()), window.weights[loss.name], rel_tol=1e-6):
        raise RecipeError(f"{weights}, but loss_of_all() reports weight {weight:g}: make both count the same items")


def evaluated_losses(forward: Forward, micro_batches: Iterable[MicroBatch]) -> Iterator[Loss]:
    """Yield the losses that this rank counts in an evaluation: those of each micro-batch, or of each whole batch."""
    if not isinstance(forward.model, WholeBatch):
        for micro in micro_batches:
            for loss in forward.losses(micro.batch, micro.packed):
                if not micro.is_empty:
                    yield loss
        return
    rank, ranks, parts = forward.fabric.global_rank, forward.fabric.world_size, []
    for micro in micro_batches:
        parts.append(embeddings_of(forward, micro.batch, micro.packed)[: 0 if micro.is_empty else None])
        if micro.is_last:
            sizes = torch.zeros(len(parts), ranks, dtype=torch.long, device=forward.device)
            sizes[:, rank] = sizes.new_tensor([len(part) for part in parts])
            if ranks > 1:
                torch.distributed.all_reduce(sizes)
            whole = gather_embeddings(parts, sizes.flatten().tolist(), rank, ranks)
            parts = []
            if rank == 0 and len(whole):
                yield forward.model.loss_of_all(whole)
