"""GPUs: what the planner must know of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A graphics card, from its maker's data sheet.

    Args:
        name: as a flag, such as a100-80gb.
        title: as a person says it, such as A100 80 GB (SXM).
        capability: CUDA compute capability, such as (8, 0).
        memory: bytes that a process finds, as ``torch.cuda.get_device_properties`` gives them.
        bandwidth: of its memory, bytes a second.
        flops: dense floating-point operations a second by torch's dtype, without sparsity; tf32 where it has it.
        bus: PCIe, bytes a second in one direction.
        link: to another GPU of the same machine, bytes a second in one direction; that of the bus where it has none.
    """

    name: str
    title: str
    capability: tuple[int, int]
    memory: int
    bandwidth: float
    flops: dict[str, float]
    bus: float
    link: float
