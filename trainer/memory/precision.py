"""``memory.precision``: of weights and arithmetic."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
)
from lightning.fabric.plugins.precision import (
    Precision as FabricPrecision,
)

from trainer.recipe import Memory


def precision_plugin(memory: Memory, device_type: str) -> FabricPrecision:
    """The Fabric plugin for ``memory.precision`` on a ``"cpu"`` or ``"cuda"`` device.

    Built here rather than from the string, because Fabric silently turns ``16-mixed`` into ``bf16-mixed`` on a CPU.
    Under FSDP it leaves casting to the ``MixedPrecisionPolicy``, which takes the place of autocast.
    """
    precision, sharded = memory.precision, memory.strategy == "fsdp"
    shards_are_masters = sharded and memory.cpu_offload == "optimizer" and precision != "64-true"
    if precision == "32-true" or (sharded and precision == "bf16-mixed"):
        return FabricPrecision()
    if sharded and precision == "16-mixed":
        return ScaledPrecision(precision, device_type, torch.amp.GradScaler(device_type))
    if shards_are_masters:
        return FabricPrecision()
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("bf16-true", "16-true"):
        return HalfPrecision(precision)
    if precision == "16-mixed":
        return MixedPrecision(precision, device_type, torch.amp.GradScaler(device_type))
    return MixedPrecision("bf16-mixed", device_type)


class ScaledPrecision(MixedPrecision):
    """The loss scaling of ``16-mixed`` without its autocast."""

    def forward_context(self) -> AbstractContextManager[None]:
        """Nothing: the weights arrive in half precision."""
        return nullcontext()
