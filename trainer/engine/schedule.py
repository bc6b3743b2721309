"""The learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from trainer.engine.events import Counters, Listener
from trainer.engine.step import Stepper
from trainer.recipe import Optim

ONE_CYCLE = {"start": 1 / 25, "rising": 0.3, "end": 1 / 25e4}
"""First and last rate of torch's OneCycleLR, relative to its max rate, and the share of steps that rise to it."""


def decay(optim: Optim, step: int, total_steps: int) -> float:
    """Return the learning-rate factor of the ``step``-th optimizer step (from 0); plateau: :class:`ReduceOnPlateau`."""
    floor, ratio = optim.min_lr / optim.lr, optim.warmup_ratio
    if optim.schedule == "range_test":  # Smith 2015: rates grow by a constant factor
        return floor ** (1 - min(1.0, step / max(1, total_steps - 1)))
    if optim.schedule == "one_cycle":  # Smith and Topin 2017; counts like torch's OneCycleLR
        share = ONE_CYCLE["rising"] if ratio is None else ratio
        peak, end = (optim.warmup_steps or share * total_steps) - 1, floor or ONE_CYCLE["end"]
        if step <= peak:
            return _cosine(ONE_CYCLE["start"], 1.0, step / peak if peak else 1.0)
        falling = total_steps - 1 - peak
        return _cosine(1.0, end, min(1.0, (step - peak) / falling) if falling > 0 else 1.0)
    warmup_steps = optim.warmup_steps if ratio is None else math.ceil(ratio * total_steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if optim.schedule == "cosine":
        return _cosine(1.0, floor, progress)
    return floor + (1 - floor) * (1 - progress) if optim.schedule == "linear" else 1.0


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))


class ReduceOnPlateau:
    """The learning-rate factor of torch's ReduceLROnPlateau, updated from validation losses."""

    def __init__(self, optim: Optim) -> None:
        alone = SGD([torch.zeros(())], lr=1.0)
        least, patience = optim.min_lr / optim.lr, optim.plateau_patience
        self.rule = ReduceLROnPlateau(alone, "min", optim.plateau_factor, patience, min_lr=least, eps=0.0)

    @property
    def factor(self) -> float:
        """The factor, from 1 down to min_lr / lr."""
        return float(self.rule.optimizer.param_groups[0]["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON, which cannot represent infinity."""
        best = self.rule.best if math.isfinite(self.rule.best) else None
        return {"factor": self.factor, "best": best, "bad": self.rule.num_bad_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        best, bad, factor = state["best"], state["bad"], state["factor"]
        if type(bad) is not int or not 0 < factor <= 1:
            raise ValueError(f"{state} is not a plateau state")
        self.rule.best = math.inf if best is None else float(best)
        self.rule.num_bad_epochs, self.rule.optimizer.param_groups[0]["lr"] = bad, float(factor)
        self.rule.last_epoch = 1  # positive: it has received losses


def lr_factor(
    optim: Optim,
    total_steps: int,
    batch_size_at: Callable[[int], int],
    skipped_steps: Callable[[], int] = lambda: 0,
    plateau: ReduceOnPlateau | None = None,
) -> Callable[[int], float]:
    """Return the function of ``LambdaLR``: decay, warm-up and batch size scaling over the ``total_steps`` of a run.

    The scaling is linear (Goyal et al. 2017) or by the square root (Krizhevsky 2014), with ``batch_size_at`` each step
    (from 0, including skipped ones). A schedule does not advance on ``skipped_steps``: its rest is spread over the
    remaining steps, so that it still ends with the last step. ``plateau`` is for schedule plateau only.
    """

    def factor(step: int) -> float:
        skipped, scale = skipped_steps(), 1.0 if plateau is None else plateau.factor
        if optim.scale_lr != "none" and optim.reference_batch_size is not None:
            ratio = batch_size_at(step + skipped) / optim.reference_batch_size
            scale *= ratio if optim.scale_lr == "linear" else math.sqrt(ratio)
        return scale * decay(optim, step, total_steps - skipped)

    return factor


class CheckpointableLambdaLR(LambdaLR):
    """``LambdaLR`` whose state is JSON, without the function, which reads its factor from ``plateau``, if any."""

    def __init__(
        self, optimizer: Optimizer, factor: Callable[[int], float], plateau: ReduceOnPlateau | None = None
    ) -> None:
        self.plateau = plateau
        super().__init__(optimizer, factor)

    def on_validation_loss(self, loss: float) -> None:
        """Update the plateau with a validation loss, equal on all ranks."""
        if self.plateau is not None:
            self.plateau.rule.step(loss)
            self.refresh()

    def refresh(self) -> None:
        """Recompute the rates of the next step after the plateau or the number of skipped steps has changed."""
        self._set(self._computed(self.last_epoch))

    def state_dict(self) -> dict[str, Any]:
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        state = {"steps": self.last_epoch, "computed": self._computed(self.last_epoch), "rates": rates}
        has_heard = self.plateau is not None and self.plateau.rule.last_epoch > 0
        return state | ({"plateau": self.plateau.state_dict()} if self.plateau is not None and has_heard else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the saved rates, unless the recipe now defines different ones."""
        if self.plateau is not None and "plateau" in state_dict:
            self.plateau.load_state_dict(state_dict["plateau"])
        steps, computed = state_dict["steps"], self._computed(state_dict["steps"])
        rates = state_dict["rates"] if state_dict["computed"] == computed else computed
        self._set(rates)
        at = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": [float(rate) for rate in rates]}
        super().load_state_dict(at | {"lr_lambdas": [None] * len(self.lr_lambdas)})

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if hasattr(group["lr"], "fill_"):  # a tensor, with torchao
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = float(rate)

    def _computed(self, step: int) -> list[float]:
        return [float(base) * factor(step) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)]


class PlateauListener(Listener):
    """Passes every validation loss to the current schedule of ``stepper``."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        assert self.stepper.scheduler is not None
        self.stepper.scheduler.on_validation_loss(result.loss)
