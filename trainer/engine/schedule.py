"""The learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from trainer.recipe import Optim, Schedule


def decay(schedule: Schedule, step: int, total_steps: int, warmup_steps: int) -> float:
    """The factor on the learning rate of the ``step``-th optimizer step (from 0); 0 once all steps are taken."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if schedule == "linear" else 1.0


def lr_factor(
    optim: Optim, total_steps: int, batch_size_at: Callable[[int], int], skipped_steps: Callable[[], int] = lambda: 0
) -> Callable[[int], float]:
    """For ``LambdaLR``: decay, warm-up and scaling with the batch size, over the ``total_steps`` of a run.

    The scaling is linear (Goyal et al. 2017) or by the square root (Krizhevsky 2014).

    Args:
        batch_size_at: from a step (from 0, skipped ones counted) to its batch size.
        skipped_steps: how many steps were skipped so far. A schedule does not move with them, so what is left of it is
            spread over the steps that are left: it reaches its end with the last step all the same.
    """

    def factor(step: int) -> float:
        skipped, scale = skipped_steps(), 1.0
        if optim.scale_lr != "none" and optim.reference_batch_size is not None:
            ratio = batch_size_at(step + skipped) / optim.reference_batch_size
            scale = ratio if optim.scale_lr == "linear" else math.sqrt(ratio)
        return scale * decay(optim.schedule, step, total_steps - skipped, optim.warmup_steps)

    return factor


class LearningRate(LambdaLR):
    """``LambdaLR`` whose state, as JSON, is where it is and the rates that it has given: its function stays its own."""

    def state_dict(self) -> dict[str, Any]:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        return {"steps": self.last_epoch, "computed": self._computed(self.last_epoch), "rates": rates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the rates that were saved, unless the recipe now asks for others.

        Those may be older than the last skipped step, which the function takes into account at its next.
        """
        steps, computed = state_dict["steps"], self._computed(state_dict["steps"])
        rates = state_dict["rates"] if state_dict["computed"] == computed else computed
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if hasattr(group["lr"], "fill_"):  # torchao's
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)
        at = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": [float(rate) for rate in rates]}
        super().load_state_dict(at | {"lr_lambdas": [None] * len(self.lr_lambdas)})

    def _computed(self, step: int) -> list[float]:
        """The rates that the function has for ``step``, with all that was skipped so far."""
        return [float(base) * factor(step) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]
