"""Sums along one binary tree, whose shape depends on the number of leaves and on nothing else.

Leaf i is what micro-batch i of a batch adds to its gradient. Every inner node is the sum of the nodes 2i and 2i + 1 below
it, or the one of them that is there: where a leaf is missing nothing is added, for adding zeros would turn -0.0 to 0.0.
Floating-point addition commutes but is not associative, so the tree decides the bits of the sum, and who adds does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tree_sum(leaves: list[Tensor]) -> Tensor:
    """The sum of at least one leaf, in the memory of the first; the others' is used up."""
    while len(leaves) > 1:
        for left, right in zip(leaves[::2], leaves[1::2], strict=False):
            left.add_(right)
        leaves = leaves[::2]
    return leaves[0]


def tree_reduce_scatter(parts: Tensor, present: int, group: Any = None) -> Tensor:
    """Sum over the ranks, which are leaves of the tree; every rank gets its part of the sum.

    Args:
        parts: of this rank's leaf, one part for each rank, one after the other: shape ``(ranks * n,)``.
        present: how many ranks, from the first on, have a leaf; the parts of the others are not looked at.
        group: the ranks; by default all of them.

    Returns:
        Shape ``(n,)``: the start of a buffer of the size of ``parts``.
    """
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    ranks = torch.distributed.get_world_size(group)
    return tree_sum(list(received.view(ranks, -1)[:present]))


class PartialSums:
    """Adds nodes of equal height that come one after the other, keeping as few as can be: a binary counter.

    After n nodes as many sums are kept as n has ones in binary: no more than log2(n) + 1. A node is a list of tensors,
    and belongs to the counter once it was added.
    """

    def __init__(self) -> None:
        self.sums: list[tuple[int, list[Tensor]]] = []  # heights, falling, and nodes

    def add(self, node: list[Tensor]) -> None:
        """The next node; only the last of all may lack leaves."""
        height = 0
        while self.sums and self.sums[-1][0] == height:
            node = _added(self.sums.pop()[1], node)
            height += 1
        self.sums.append((height, node))

    def total(self) -> list[Tensor]:
        """The root. The counter is empty afterwards."""
        _, node = self.sums.pop()
        while self.sums:
            node = _added(self.sums.pop()[1], node)
        return node

    def clear(self) -> None:
        """Forget everything."""
        self.sums.clear()


def _added(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    if left:
        torch._foreach_add_(left, right)
    return left
