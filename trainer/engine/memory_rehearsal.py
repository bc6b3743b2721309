"""A trial step that shows whether memory suffices, and changes nothing."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from trainer.engine.model_state import ModelState
from trainer.engine.step import Stepper
from trainer.engine.window import Window


def rehearse(stepper: Stepper, window: Window) -> None:
    """Run forward and backward of ``window`` with the optimizer's state in memory, as in any step after the first."""
    is_first = not stepper.optimizer.state
    state = ModelState(stepper.module, stepper.model, stepper.generator)
    state.copy_small()
    try:
        if is_first:
            init_optimizer_state(stepper.optimizer)
        stepper.accumulate(window)
    finally:
        if is_first:
            stepper.optimizer.state.clear()
        state.restore()
    stepper.abandon()


def init_optimizer_state(optimizer: Optimizer) -> None:
    """Let the optimizer create its state in a step with learning rate 0 and zero gradients, which moves no weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0  # keeps the type: torchao uses a tensor
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    finally:
        for parameter in parameters:
            parameter.grad = None
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
