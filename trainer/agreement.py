"""What the ranks decide together, most of it without a collective of its own.

Before every step the ranks sum the weights of the batch on the host. What each has to tell the others (it was asked to
stop, a checkpoint is due) travels in the same sum, so all know it at the same step boundary, at no cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric

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


def from_first(fabric: Fabric, value: Any) -> Any:
    """What the first rank gives, on all ranks: as JSON has it, for torch's own broadcast of objects unpickles them."""
    if fabric.world_size == 1:
        return value
    content = _packed(fabric, value)
    size = torch.tensor(len(content), device=fabric.device)
    torch.distributed.broadcast(size, 0)
    if fabric.global_rank != 0:
        content = torch.empty(int(size), dtype=torch.uint8, device=fabric.device)
    torch.distributed.broadcast(content, 0)
    return json.loads(bytes(content.tolist()))


def from_all(fabric: Fabric, value: Any) -> list[Any]:
    """What every rank gives, in their order, likewise."""
    if fabric.world_size == 1:
        return [value]
    content = _packed(fabric, value)
    sizes = torch.zeros(fabric.world_size, dtype=torch.long, device=fabric.device)
    sizes[fabric.global_rank] = len(content)
    torch.distributed.all_reduce(sizes)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=fabric.device)
    padded[: len(content)] = content
    found = [torch.empty_like(padded) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(found, padded)
    return [json.loads(bytes(one[:size].tolist())) for one, size in zip(found, sizes.tolist(), strict=True)]


def _packed(fabric: Fabric, value: Any) -> torch.Tensor:
    content = bytearray(json.dumps(value).encode())
    return torch.frombuffer(content, dtype=torch.uint8).to(fabric.device)
