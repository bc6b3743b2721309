"""Memory as it is: device peaks from the allocator, the host's from the operating system. GB is 1e9 bytes."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

GB = 1e9


@dataclass(frozen=True)
class MemoryUse:
    """Peaks so far in GB: of tensors and of what the allocator holds (``None`` without a GPU), and of the host."""

    allocated_gb: float | None
    reserved_gb: float | None
    host_peak_gb: float

    def describe(self) -> str:
        """In one phrase: reserved memory on a GPU, resident memory elsewhere."""
        if self.reserved_gb is not None:
            return f"{self.reserved_gb:.2f} GB reserved"
        return f"{self.host_peak_gb:.2f} GB host peak"


def measure(device: torch.device) -> MemoryUse:
    """The peaks so far of ``device`` and of this process."""
    # ru_maxrss is in KiB on Linux and in bytes on macOS
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.type != "cuda":
        return MemoryUse(None, None, host / GB)
    return MemoryUse(
        torch.cuda.max_memory_allocated(device) / GB, torch.cuda.max_memory_reserved(device) / GB, host / GB
    )
