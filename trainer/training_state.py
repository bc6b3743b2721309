"""What training has to remember besides tensors: where it is, and the small state of its parts. As JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trainer.engine.events import Counters
from trainer.engine.step import Stepper
from trainer.engine.sync import OverlappedSync, OverlappedWhereAllAreReached
from trainer.engine.window import Windows
from trainer.listeners import Stopwatch


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
        "base": [float(rate) for rate in scheduler.base_lrs],
        "rates": [float(group["lr"]) for group in scheduler.optimizer.param_groups],
    }


def _restore_schedule(state: Mapping[str, Any], scheduler: LRScheduler | None) -> None:
    """The rates are those that were saved, unless the recipe now asks for others."""
    assert scheduler is not None
    scheduler.last_epoch = state["steps"]
    scheduler._step_count = state["steps"] + 1
    unchanged = state["base"] == [float(rate) for rate in scheduler.base_lrs]
    rates = state["rates"] if unchanged else scheduler.get_lr()
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if hasattr(group["lr"], "fill_"):  # torchao's
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = float(rate)
    scheduler._last_lr = [float(rate) for rate in rates]
