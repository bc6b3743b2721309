"""What ``run.deterministic`` keeps of the micro-steps that a trace leaves out."""

from __future__ import annotations

import torch

from trainer.engine.deterministic import TreeSync
from trainer.engine.sync import GradientSync
from trainer.engine.tree import Node, PartialSums

ABOVE_ALL = 64
"""A height that no sum of micro-steps reaches: such sums are added to nothing until the end of a window."""


class LaterSums(PartialSums):
    """A counter that begins with the sums of micro-steps that nobody has traced.

    Args:
        earlier: how many.
    """

    def __init__(self, earlier: int) -> None:
        super().__init__()
        self.earlier = earlier

    def add(self, node: Node) -> None:
        """As if the first node of a window came late in it."""
        if not self.sums and node is not None:
            self.sums = [
                (ABOVE_ALL + self.earlier - number, [torch.empty_like(tensor) for tensor in node])
                for number in range(self.earlier)
            ]
        super().add(node)


def begin_late(sync: GradientSync, traced: int, skipped: int) -> None:
    """Let ``sync`` keep as many sums in ``traced`` micro-steps as in a window that has the ``skipped`` ones, too."""
    if isinstance(sync, TreeSync):
        sync.sums = LaterSums(most_sums(traced + skipped) - most_sums(traced))


def most_sums(micro_steps: int) -> int:
    """How many sums are kept at most while a gradient is computed: the most ones in binary of a smaller number."""
    return micro_steps.bit_length() - 1
