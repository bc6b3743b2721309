"""A simulated GPU: predicts memory and time of a training loop on a card without that card.

with fake_gpu("a100-80gb") as gpu:      # any loop: peaks, largest blocks, estimated time of a step
    train()
print(gpu)

with tracing(Target.here(card)) as tracer:      # the operations of a block of code
    train()
memory = replay(tracer.trace)                   # peaks of torch's allocator for the same allocations
cost = step_cost(tracer.trace, card, seconds)   # milliseconds; seconds(work): link, time of a collective
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.fakegpu.user_loop import FakeGPU, fake_gpu

_LAZY = {"fake_gpu": "user_loop", "FakeGPU": "user_loop", "tracing": "tracer", "replay": "peaks", "step_cost": "cost"}
__all__ = ["FakeGPU", "fake_gpu", "replay", "step_cost", "tracing"]


def __getattr__(name: str) -> Any:  # imported on first use, because most modules need torch
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
