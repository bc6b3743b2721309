"""Sums along one binary tree, whose shape depends on the number of leaves and on nothing else.

Leaf i is what micro-batch i of a batch adds to its gradient. Every inner node is the sum of the nodes 2i and 2i + 1
below it, or the one of them that is there: for a missing leaf nothing is added, as a zero would turn -0.0 to 0.0.
Floating-point addition commutes but is not associative: the tree decides the bits of the sum, and who adds does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Node = list[Tensor] | None
"""The tensors of a node; ``None`` for one without leaves below it."""


def add_nodes(left: Node, right: Node) -> Node:
    """The sum of two neighbours, in the memory of one of them."""
    if not left or not right:
        return left or right
    torch._foreach_add_(left, right)
    return left


def tree_sum(leaves: Sequence[Node]) -> Node:
    """The root over all leaves, in the memory of one of them; the others' is used up."""
    nodes = list(leaves)
    while len(nodes) > 1:
        nodes += [None] * (len(nodes) % 2)
        nodes = [add_nodes(left, right) for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


def tree_reduce_scatter(parts: Tensor, present: Sequence[bool], group: Any = None) -> Tensor:
    """Sum over the ranks, which are leaves of the tree; every rank gets its part of the sum.

    Args:
        parts: of this rank's leaf, one part for each rank, one after the other: shape ``(ranks * n,)``.
        present: which ranks have a leaf; the parts of the others are not looked at. At least one has.
        group: the ranks; by default all of them.

    Returns:
        Shape ``(n,)``, in a buffer of the size of ``parts``.
    """
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    rows = received.view(len(present), -1)
    root = tree_sum([[row] if is_there else None for row, is_there in zip(rows, present, strict=True)])
    assert root is not None
    return root[0]


class PartialSums:
    """Adds nodes of equal height that come one after the other, keeping as few as can be: a binary counter.

    After n nodes as many sums are kept as n has ones in binary: no more than log2(n) + 1. What was added belongs to the
    counter.
    """

    def __init__(self) -> None:
        self.sums: list[tuple[int, Node]] = []  # heights, falling, and nodes

    def add(self, node: Node) -> None:
        """The next node."""
        height = 0
        while self.sums and self.sums[-1][0] == height:
            node = add_nodes(self.sums.pop()[1], node)
            height += 1
        self.sums.append((height, node))

    def total(self) -> Node:
        """The root. The counter is empty afterwards."""
        node: Node = None
        while self.sums:
            node = add_nodes(self.sums.pop()[1], node)
        return node

    def clear(self) -> None:
        """Forget everything."""
        self.sums.clear()
