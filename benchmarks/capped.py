"""``python benchmarks/capped.py GB fit RECIPE ...``: the trainer, on a GPU of which only GB × 1e9 bytes may be used."""

from __future__ import annotations

import sys

import torch

from trainer.cli import run


def cap(gigabytes: float) -> None:
    """Make the allocator refuse to hold more; what CUDA itself takes (its context, the kernels) is not counted."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * 1e9 / total), 0)


if __name__ == "__main__":
    if torch.cuda.is_available():
        cap(float(sys.argv[1]))
    sys.exit(run(sys.argv[2:]))
