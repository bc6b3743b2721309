"""Faults that are planted in our own code, in a process that ends with the run: each must be found.

That a wait, a pin or a stream is forgotten is planted by the detector itself, wherever one is met: see ``Detector``.
Here is what else can go wrong. Functions are replaced, not their text; the list that is returned grows whenever the
replacement is called, so that a fault that no longer meets anything fails, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from trainer.data import loader
from trainer.engine.loss_totals import LossTotals
from trainer.engine.step import Stepper
from trainer.launching import start
from trainer.memory import activation_offload, optimizer_offload
from trainer.memory.eager_update import EagerOptimizerUpdate
from trainer.memory.precision import HostGradScaler
from trainer.models import MLP

Met = list[Any]


def gradients_are_not_kept() -> Met:
    """Those on their way to the host are freed before they have left."""
    return _forget_tensors(optimizer_offload)


def activations_are_not_kept() -> Met:
    return _forget_tensors(activation_offload)


def _forget_tensors(module: Any) -> Met:
    met: Met = []

    class Forgetful(deque):
        def append(self, item: Any) -> None:
            met.append(1)
            super().append(tuple(torch.empty(0) if isinstance(part, torch.Tensor) else part for part in item))

    module.deque = Forgetful
    return met


def weights_come_beside() -> Met:
    """New weights are copied to the device on a stream that nobody waits for."""
    return _on_another_stream(optimizer_offload.HostGradientSync, "copy_to_device")


def built_beside() -> Met:
    """DDP is built on a stream that nobody waits for, as Lightning's strategy does it."""
    met: Met = []
    strategy_of = start.fabric_strategy

    def strategy(*args: Any) -> Any:
        made = strategy_of(*args)
        met.append(_on_another_stream(made, "setup_module"))
        return made

    start.fabric_strategy = strategy
    return met


def _on_another_stream(owner: Any, name: str) -> Met:
    met: Met = []
    function = getattr(owner, name)

    def beside(*args: Any) -> Any:
        met.append(1)
        with torch.cuda.stream(torch.cuda.Stream()):
            return function(*args)

    setattr(owner, name, beside)
    return met


def scale_on_the_device() -> Met:
    """The loss scale of offloaded gradients comes from the device, by a copy that nothing waits for.

    Only the optimizer's own: an update ahead takes the scale as it is, and raises if it is not on the host.
    """
    EagerOptimizerUpdate.begin_last_backward = lambda _: None  # type: ignore[method-assign]
    name = "_lazy_init_scale_growth_tracker"
    return _around(HostGradScaler, name, lambda original, *args: getattr(torch.amp.GradScaler, name)(*args))


def _around(owner: Any, name: str, other: Callable[..., Any]) -> Met:
    """Call ``other`` in the place of a method, with that method and what it is given."""
    met: Met = []
    method = vars(owner)[name]

    def replaced(*args: Any) -> Any:
        met.append(1)
        return other(method, *args)

    setattr(owner, name, replaced)
    return met


def loss_is_read() -> Met:
    """A model looks at its loss."""
    met: Met = []
    losses = MLP.losses

    def read(model: Any, module: Any, batch: Any) -> Any:
        for loss in losses(model, module, batch):
            met.append(loss.total.item())
            yield loss

    MLP.losses = read  # type: ignore[method-assign]
    return met


def loss_is_branched_on() -> Met:
    """The engine skips what is 0."""

    def added(add: Any, totals: Any, loss: Any, is_empty: bool) -> None:
        if loss.total:
            add(totals, loss, is_empty)

    return _around(LossTotals, "add", added)


def losses_are_copied() -> Met:
    """The engine keeps losses on the host."""

    def added(add: Any, totals: Any, loss: Any, is_empty: bool) -> None:
        add(totals, loss, is_empty)
        totals.parts[loss.name][-1].cpu()

    return _around(LossTotals, "add", added)


def device_is_awaited() -> Met:
    """Every micro-step begins when the one before is over."""

    def prepared(prepare: Any, *args: Any) -> None:
        torch.cuda.synchronize()
        prepare(*args)

    return _around(Stepper, "prepare", prepared)


def norm_is_read() -> Met:
    """The norm is read before it is read with the losses."""

    def clipped(clip: Any, stepper: Any) -> Any:
        norm = clip(stepper)
        float(norm)
        return norm

    return _around(Stepper, "clip_gradients", clipped)


def packed_in_the_step() -> Met:
    """The loader does not pack: what the step makes of its tensors is in memory that is not pinned."""
    met: Met = []

    def unpacked(batch: Any, packed: Any) -> Any:
        met.append(packed)
        return batch

    loader.PackedInMemory = unpacked  # type: ignore[misc, assignment]
    return met


UNORDERED: dict[Callable[[], Met], tuple[str, str]] = {
    gradients_are_not_kept: ("optimizer, fp16, clipped", "reused in use"),
    activations_are_not_kept: ("activations", "reused in use"),
    weights_come_beside: ("optimizer, fp16, clipped", "race"),
    scale_on_the_device: ("optimizer, fp16, clipped", "race"),
    built_beside: ("ddp of 2", "race"),
    packed_in_the_step: ("packed language model, chunked loss", "pageable copy"),
}
"""In which configuration each shows, and as what."""

WAITING: dict[Callable[[], Met], tuple[str, str]] = {
    loss_is_read: ("fp16", "forward"),
    loss_is_branched_on: ("fp16", "backward"),
    losses_are_copied: ("activations", "backward"),
    device_is_awaited: ("fp16", "backward"),
    norm_is_read: ("fp16", "step"),
}
"""In which configuration each host sync shows, and in which phase."""
