"""A simulated GPU: what any training loop takes of a card, in memory and time, found without one.

``fake_gpu(card)`` is for a whole loop, ``tracing(target)`` records what runs in a block, ``replay(trace)`` lets torch's
allocator do the same, and ``step_cost`` estimates the time. Of this package it imports only ``system`` and ``errors``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {"fake_gpu": "any_loop", "FakeGPU": "any_loop", "tracing": "tracer", "replay": "peaks", "step_cost": "cost"}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:  # most of it needs torch, and much of that: imported when it is used
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
