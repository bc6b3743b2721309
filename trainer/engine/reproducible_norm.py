"""A norm that does not depend on the order of its elements, nor on how ranks share them.

A sum of squares in floating point rounds after every addition, so its bits depend on the order. Here every square is
made an integer first, relative to the largest element, and integers are added exactly: the idea of Demmel and Nguyen,
"Parallel Reproducible Summation" (2015), with two bins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_BITS = {"cpu": 16, "cuda": 22}
"""Log2 of how many elements are converted at once: on a CPU their copies in float64 stay in the cache."""

MANTISSA_BITS = 52

LEAST_EXPONENT = -1000
"""Of the largest element: 2 to the power of its negative must be finite in float64."""


@torch.no_grad()
def reproducible_norm(parts: Sequence[Tensor], elements: int, device: torch.device, over_ranks: bool) -> Tensor:
    """The 2-norm of all elements together, in float64; a scalar, infinite if any element is not finite.

    Squares are rounded 2 b bits below that of the largest element, so that with N elements the result is off by no more
    than N 2^(-2 b) of itself. b is 36 on a CPU and 30 on a GPU (from 2^26 and 2^32 elements on, 62 - log2 N): 1e-15 for
    a million elements on a CPU, 1e-9 for a billion on a GPU.

    Args:
        parts: what this rank has of the elements; may be empty.
        elements: how many there are over all ranks.
        device: where they are.
        over_ranks: whether every rank has a part of its own; else each has all.
    """
    parts = [part for part in parts if part.numel()]
    largest = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        largest = torch.stack(torch._foreach_norm(list(parts), float("inf"))).amax().double()
    largest = largest.masked_fill(~largest.isfinite(), torch.inf)  # a maximum over the ranks may lose NaN
    if over_ranks:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    exponent = torch.frexp(largest).exponent.clamp(min=LEAST_EXPONENT)
    scale = torch.exp2(-exponent.double())  # every element times this is at most 1
    chunk_bits = CHUNK_BITS[device.type]
    bits = min(MANTISSA_BITS - chunk_bits, 62 - max(1, elements - 1).bit_length())
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for part in parts:
        for chunk in part.reshape(-1).split(2**chunk_bits):
            sums += _squares(chunk, scale, bits)
    if over_ranks:
        torch.distributed.all_reduce(sums)
    high, low = sums.double().unbind()
    norm = ((high + low * 2.0**-bits) * 2.0**-bits).sqrt() / scale
    return norm.masked_fill(~largest.isfinite(), torch.inf)


def _squares(chunk: Tensor, scale: Tensor, bits: int) -> Tensor:
    """The sum of the squares of ``chunk``, times 2^bits, and what that leaves behind the point, times 2^bits again.

    Both are sums of integers below 2^52: float64 adds them exactly, in any order, and faster than they are converted.
    """
    squares = (chunk.double() * scale).square_().mul_(2.0**bits)
    high = squares.floor()
    low = squares.sub_(high).mul_(2.0**bits).round_()
    return torch.stack([high.sum(), low.sum()]).to(torch.int64)
