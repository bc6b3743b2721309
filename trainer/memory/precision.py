"""``memory.precision``: of weights and arithmetic."""

from __future__ import annotations

import torch
from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
)
from lightning.fabric.plugins.precision import (
    Precision as FabricPrecision,
)

from trainer.recipe import Precision


def weights_dtype(precision: Precision) -> torch.dtype | None:
    """The type of weights under ``precision``; ``None`` where they stay as the model makes them."""
    return {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision)


def precision_plugin(precision: Precision, device_type: str) -> FabricPrecision:
    """The Fabric plugin for ``precision`` on a ``"cpu"`` or ``"cuda"`` device.

    Built here rather than from the string, because Fabric silently turns ``16-mixed`` into ``bf16-mixed`` on a CPU.
    """
    if precision == "32-true":
        return FabricPrecision()
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("bf16-true", "16-true"):
        return HalfPrecision(precision)
    if precision == "16-mixed":
        return MixedPrecision(precision, device_type, torch.amp.GradScaler(device_type))
    return MixedPrecision("bf16-mixed", device_type)
