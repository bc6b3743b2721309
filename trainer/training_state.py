"""What training has to remember besides tensors: where it is, and the small state of its parts. As JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer.engine.events import Counters
from trainer.engine.step import Stepper
from trainer.engine.sync import OverlappedSync, OverlappedWhereAllAreReached
from trainer.engine.window import Windows
from trainer.listeners import Stopwatch

MOST_HALVINGS = 64
"""Of a micro-batch: none has 2 ** 64 samples."""


def common_state(counters: Counters, stepper: Stepper, windows: Windows, stopwatch: Stopwatch) -> dict[str, Any]:
    """The state that is the same on all ranks."""
    scaler = getattr(stepper.precision, "scaler", None)
    return {
        "counters": dataclasses.asdict(counters),
        "skipped_steps": stepper.skipped_steps,
        "scheduler": _schedule(stepper.scheduler),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "overlapped": is_overlapped(stepper),
        "halvings": windows.halvings,
        "quarantine": windows.quarantine.to_dict(),
        "stopwatch": {"seconds": stopwatch.seconds, "samples": stopwatch.samples},
    }


def restore_common_state(
    state: Mapping[str, Any], counters: Counters, stepper: Stepper, windows: Windows, stopwatch: Stopwatch
) -> None:
    """Put ``state`` into parts that were made anew."""
    for name, value in state["counters"].items():
        setattr(counters, name, value)
    stepper.skipped_steps = state["skipped_steps"]
    _restore_schedule(state["scheduler"], stepper.scheduler)
    scaler = getattr(stepper.precision, "scaler", None)
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    sync = stepper.sync
    if state["overlapped"] and isinstance(sync, OverlappedWhereAllAreReached):
        sync.sync = OverlappedSync(sync.module, sync.parameters)
    if not 0 <= state["halvings"] < MOST_HALVINGS:
        raise ValueError(f"halvings is {state['halvings']}")
    while windows.halvings < state["halvings"]:
        windows.halve()
    windows.quarantine.restore(state["quarantine"])
    stopwatch.seconds, stopwatch.samples = state["stopwatch"]["seconds"], state["stopwatch"]["samples"]


def is_overlapped(stepper: Stepper) -> bool:
    """Whether DDP reduces while backward goes on, which it does from the second step on where it can."""
    sync = stepper.sync
    return isinstance(sync, OverlappedWhereAllAreReached) and isinstance(sync.sync, OverlappedSync)


def _schedule(scheduler: LRScheduler | None) -> dict[str, Any]:
    assert scheduler is not None
    return {
        "steps": scheduler.last_epoch,
        "computed": _computed(scheduler),
        "rates": [float(group["lr"]) for group in scheduler.optimizer.param_groups],
    }


def _computed(scheduler: LRScheduler) -> list[float]:
    """The rates that the schedule has for where it is, with all that was skipped so far."""
    assert isinstance(scheduler, LambdaLR)
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    return [float(base) * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]


def _restore_schedule(state: Mapping[str, Any], scheduler: LRScheduler | None) -> None:
    """The rates are those that were saved, unless the recipe now asks for others.

    Those that were saved may be older than the last skipped step, which the schedule takes into account at its next.
    """
    assert scheduler is not None
    scheduler.last_epoch = state["steps"]
    scheduler._step_count = state["steps"] + 1
    computed = _computed(scheduler)
    rates = state["rates"] if state["computed"] == computed else computed
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if hasattr(group["lr"], "fill_"):  # torchao's
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = float(rate)
    scheduler._last_lr = [float(rate) for rate in rates]
