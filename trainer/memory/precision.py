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
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from trainer.recipe import Memory


def weights_dtype(memory: Memory) -> torch.dtype | None:
    """The type that weights are created in; ``None`` where they stay as the model makes them, fp32 usually.

    Master weights are fp32 whatever the precision of those on the device.
    """
    types = {"64-true": torch.float64}
    if memory.cpu_offload != "optimizer":
        types |= {"bf16-true": torch.bfloat16, "16-true": torch.float16}
    return types.get(memory.precision)


def precision_plugin(memory: Memory, device_type: str) -> FabricPrecision:
    """The Fabric plugin for ``memory.precision`` on a ``"cpu"`` or ``"cuda"`` device.

    Built here rather than from the string, because Fabric silently turns ``16-mixed`` into ``bf16-mixed`` on a CPU.
    Under FSDP it leaves casting to the ``MixedPrecisionPolicy``, which takes the place of autocast.
    """
    precision, sharded = memory.precision, memory.strategy == "fsdp"
    gradients_on_host = memory.cpu_offload != "none"
    shards_are_masters = sharded and memory.cpu_offload == "optimizer" and precision != "64-true"
    if precision == "32-true" or (sharded and precision == "bf16-mixed"):
        return FabricPrecision()
    if sharded and precision == "16-mixed":
        # An overflow in one rank's shards must lower the loss scale of all.
        return ScaledPrecision(
            precision, device_type, (HostShardedGradScaler if gradients_on_host else ShardedGradScaler)(device_type)
        )
    if shards_are_masters:
        return FabricPrecision()
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("bf16-true", "16-true"):
        return HalfPrecision(precision)
    if precision == "16-mixed":
        scaler = (HostGradScaler if gradients_on_host else torch.amp.GradScaler)(device_type)
        return MixedPrecision(precision, device_type, scaler)
    return MixedPrecision("bf16-mixed", device_type)


class ScaledPrecision(MixedPrecision):
    """The loss scaling of ``16-mixed`` without its autocast."""

    def forward_context(self) -> AbstractContextManager[None]:
        """Nothing: the weights arrive in half precision."""
        return nullcontext()


class _ScaleOnHost(torch.amp.GradScaler):
    """Keeps the loss scale where offloaded gradients are.

    A scale on the GPU would be brought to them by a copy that nothing waits for (``_MultiDeviceReplicator`` copies with
    ``non_blocking``, into pinned memory): they could be divided by whatever was in that memory before, and the flag of
    an overflow be overwritten.
    """

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))


class HostGradScaler(_ScaleOnHost):
    """The loss scale of offloaded gradients on one rank, or the same on all."""


class HostShardedGradScaler(_ScaleOnHost, ShardedGradScaler):
    """The loss scale of offloaded gradients that are sharded."""
