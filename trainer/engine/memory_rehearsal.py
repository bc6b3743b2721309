"""A trial step that shows whether memory suffices, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from trainer.engine.cut import cut_batch, largest_micro_batch
from trainer.engine.model_state import ModelState
from trainer.engine.step import Stepper
from trainer.engine.window import Window, Windows

MAX_SEARCHED_SAMPLES = 2**18  # max samples searched for the fullest packed micro-batch; above, a bound is used


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


def longest_window(windows: Windows, epochs: int) -> Window:
    """Return a window of the largest possible micro-batch, twice if steps can have two."""
    spans = windows.epoch_ranges(epochs)
    windows.current_epoch = max(spans, key=lambda span: windows.cut(span.start).micro_batch_size).start
    cut, lengths, packs = windows.cut(windows.current_epoch), windows.lengths, windows.packs
    if packs and lengths is not None and epochs * windows.size <= MAX_SEARCHED_SAMPLES:
        steps = ((epoch, step) for epoch in range(epochs) for step in range(windows.steps(epoch)))
        pieces = [piece for epoch, step in steps for piece in windows.pieces(epoch, step)]
    else:
        order: Sequence[int] = [*windows.longest_candidates, *range(min(windows.size, cut.micro_batch_size))]
        if lengths is not None:
            order = sorted(range(windows.size), key=lambda index: -lengths[index])
        if cut.micro_batch_tokens is None:  # otherwise shorter samples may make more tokens
            order = order[: cut.micro_batch_size]
        pieces = cut_batch(order, cut, 1, lengths, packs)
    count = 2 if cut.accumulate > 1 or cut.micro_batch_tokens is not None else 1
    return windows.repeated(largest_micro_batch(pieces, lengths, packs), count)


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
