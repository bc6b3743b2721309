"""Labels that no class has: found on the host, before a kernel reads outside its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.contract import IGNORED_LABEL

SMALL = 64
"""Entries up to which a list is faster than tensor operations."""


def stray_labels(batch: Any, num_classes: int) -> list[tuple[int, int | None]]:
    """The labels of a collated batch that are none of ``num_classes`` classes, each with its row.

    Looks at integer tensors ``batch["labels"]`` in host memory, of shape ``(n, ...)``; -100 is no label. The row is
    ``None`` for a tensor without rows.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_cuda or not labels.numel():
        return []
    if _all_classes(labels, num_classes):
        return []
    stray = ((labels < 0) | (labels >= num_classes)) & (labels != IGNORED_LABEL)
    rows = stray.nonzero()[:, 0].tolist() if labels.ndim else [None] * int(stray)
    return list(zip(labels[stray].tolist(), rows, strict=True))


def _all_classes(labels: Tensor, num_classes: int) -> bool:
    if labels.dtype == torch.bool:
        return True
    if labels.numel() <= SMALL:
        values = labels.flatten().tolist()
        return min(values) >= 0 and max(values) < num_classes
    least, largest = torch.aminmax(labels)
    return int(least) >= 0 and int(largest) < num_classes
