"""The learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.recipe import Optim, ScaleLR, Schedule


def decay(schedule: Schedule, step: int, total_steps: int, warmup_steps: int) -> float:
    """The factor on the learning rate of the ``step``-th optimizer step (from 0); 0 once all steps are taken."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if schedule == "linear" else 1.0


def batch_factor(rule: ScaleLR, batch_size: int, reference_batch_size: int | None) -> float:
    """How the learning rate grows with the batch: linear (Goyal et al. 2017) or sqrt (Krizhevsky 2014)."""
    if rule == "none" or reference_batch_size is None:
        return 1.0
    ratio = batch_size / reference_batch_size
    return ratio if rule == "linear" else math.sqrt(ratio)


def lr_factor(
    optim: Optim,
    total_steps: int,
    batch_size_at: Callable[[int], int],
    skipped_steps: Callable[[], int] = lambda: 0,
) -> Callable[[int], float]:
    """For ``LambdaLR``: decay, warm-up and batch-size scaling.

    Args:
        optim: says which.
        total_steps: of the run.
        batch_size_at: from a step (from 0, skipped ones counted) to its batch size.
        skipped_steps: how many steps were skipped so far. A schedule does not move with them, so what is left of it is
            spread over the steps that are left: it reaches its end with the last step all the same.
    """

    def factor(step: int) -> float:
        skipped = skipped_steps()
        scale = batch_factor(optim.scale_lr, batch_size_at(step + skipped), optim.reference_batch_size)
        return scale * decay(optim.schedule, step, total_steps - skipped, optim.warmup_steps)

    return factor
