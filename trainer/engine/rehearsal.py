"""A step that shows whether there is memory for it, and leaves no trace."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from trainer.engine.model_state import ModelState
from trainer.engine.step import Stepper
from trainer.engine.window import Window


def rehearse(stepper: Stepper, window: Window) -> None:
    """Forward and backward of ``window``, with the optimizer's state in memory as in every step but the first."""
    is_first = not stepper.optimizer.state
    state = ModelState(stepper.module, stepper.model, stepper.generator)
    state.copy_small()
    try:
        if is_first:
            make_state(stepper.optimizer)
        stepper.accumulate(window)
    finally:
        if is_first:
            stepper.optimizer.state.clear()
        state.restore()
    stepper.abandon()


def make_state(optimizer: Optimizer) -> None:
    """Let the optimizer make its state as its first step would, in the types and on the devices that it wants.

    By a step of length 0, with gradients of 0; no weight moves.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0  # of the type that it had: torchao's is a tensor
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter in parameters:
            parameter.grad = None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
