"""``memory.strategy``: how the weights are held by the ranks."""

from __future__ import annotations

from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from trainer.memory.plan import Plan


def fabric_strategy(plan: Plan, accelerator: str) -> Strategy:
    """The Fabric strategy of ``plan`` on a ``"cpu"`` or ``"cuda"`` accelerator."""
    if plan.strategy == "single":
        return SingleDeviceStrategy(device="cuda:0" if accelerator == "cuda" else "cpu")
    return DDPStrategy(gradient_as_bucket_view=True)  # gradients live in DDP's buckets: one copy, not two
