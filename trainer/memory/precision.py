"""``memory.precision`` and ``memory.matmul_precision``: the dtypes of weights and arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning_fabric.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning_fabric.plugins.precision import Precision as FabricPrecision
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from trainer.recipe import MatmulPrecision, Memory


def weights_dtype(memory: Memory) -> torch.dtype | None:
    """Return the dtype in which weights are created; ``None`` for the model's. Master weights are always fp32."""
    types = {"64-true": torch.float64}
    if memory.cpu_offload != "optimizer":
        types |= {"bf16-true": torch.bfloat16, "16-true": torch.float16}
    return types.get(memory.precision)


def precision_plugin(memory: Memory, device_type: str) -> FabricPrecision:
    """Build the Fabric plugin for ``memory.precision`` on a ``"cpu"`` or ``"cuda"`` device.

    Fabric itself silently turns ``16-mixed`` into ``bf16-mixed`` on a CPU. FSDP's policy casts instead of autocast.
    """
    precision, sharded = memory.precision, memory.strategy == "fsdp"
    if precision == "16-mixed":
        # An overflow in one rank's shards must lower the loss scale of all ranks.
        plain, offloaded = (ShardedGradScaler, HostShardedGradScaler) if sharded else (GradScaler, HostGradScaler)
        scaler = (plain if memory.cpu_offload == "none" else offloaded)(device_type)
        return (ScaledPrecision if sharded else AutocastPrecision)(precision, device_type, scaler)
    if precision == "64-true":
        return DoublePrecision()
    shards_are_masters = sharded and memory.cpu_offload == "optimizer"
    if precision == "32-true" or shards_are_masters or (sharded and precision == "bf16-mixed"):
        return FabricPrecision()
    return AutocastPrecision(precision, device_type) if precision == "bf16-mixed" else HalfPrecision(precision)  # type: ignore[arg-type]


class AutocastPrecision(MixedPrecision):
    """Mixed precision with fp32 inputs: autocast casts what an operation needs, and labels are not rounded."""

    def convert_input(self, data: Any) -> Any:
        return self.convert_output(data)  # to fp32


class ScaledPrecision(AutocastPrecision):
    """The loss scaling of ``16-mixed`` without its autocast."""

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # the weights arrive in half precision


class HostGradScaler(GradScaler):
    """A scaler with the loss scale in host memory, where offloaded gradients are.

    ``_MultiDeviceReplicator`` would copy a scale on the GPU with ``non_blocking``, without synchronization: gradients
    could be divided by stale memory, and the overflow flag be overwritten.
    """

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device("cpu"))


class HostShardedGradScaler(HostGradScaler, ShardedGradScaler):
    """The loss scale of offloaded gradients that are sharded."""


@contextmanager
def matmul_precision(precision: MatmulPrecision) -> Iterator[None]:
    """Compute fp32 products, convolutions and recurrent layers with the precision ``precision`` in this context.

    Torch uses TF32 in cuDNN by default, but not in cuBLAS; here one setting controls both. Older and newer flags
    (``fp32_precision``) are both set, because torch rejects flags that contradict each other, and restored on exit.
    """
    backends: Any = torch.backends
    products, on_cpu = backends.cuda.matmul, backends.mkldnn.matmul
    parts = (products, on_cpu, backends.cudnn.conv, backends.cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    named = "highest" if products.fp32_precision != "tf32" else "medium" if on_cpu.fp32_precision == "bf16" else "high"
    try:
        torch.set_float32_matmul_precision(precision)  # the older flag, which Fabric and the compiler read
        backends.cudnn.allow_tf32 = precision != "highest"  # the older flag of cuDNN
        for part in parts[2:]:
            part.fp32_precision = "ieee" if precision == "highest" else "tf32"
        yield
    finally:
        torch.set_float32_matmul_precision(named)
        backends.cudnn.allow_tf32 = before[2] == before[3] == "tf32"
        for part, setting in zip(parts, before, strict=True):
            part.fp32_precision = setting
