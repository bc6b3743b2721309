"""What the ranks decide together, without a collective of its own.

Before every step the ranks sum the weights of the batch on the host. What each has to tell the others (it was asked to
stop, a checkpoint is due) travels in the same sum, so all know it at the same step boundary, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Sum = Callable[[list[float]], list[float]]


class Agreement:
    """Sums floats over the ranks, and the votes of this rank with them.

    Args:
        total: sums a list of floats over all ranks.
        votes: what this rank says at the moment: numbers, as many on every rank.
    """

    def __init__(self, total: Sum, votes: Callable[[], Sequence[float]] = tuple) -> None:
        self.total, self.votes = total, votes
        self.agreed: list[float] = []
        """The sums of the votes, as of the last call."""

    def __call__(self, values: list[float]) -> list[float]:
        totals = self.total([*values, *self.votes()])
        self.agreed = totals[len(values) :]
        return totals[: len(values)]
