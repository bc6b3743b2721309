"""Which samples make step s of epoch e: a pure function of (seed, epoch, size), so that resuming is arithmetic."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import torch


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2^63) from integers such as (seed, epoch, step, position); unequal parts give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, size: int) -> torch.Tensor:
    """The order of the ``size`` training samples in ``epoch``: int64, shape ``(size,)``."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    return torch.randperm(size, generator=generator)


def steps_in_epoch(size: int, batch_size: int) -> int:
    """How many batches an epoch has; the last may hold fewer than ``batch_size`` samples."""
    return -(-size // batch_size)


def batch_indices(seed: int, epoch: int, step: int, size: int, batch_size: int) -> list[int]:
    """The samples of the ``step``-th batch (from 0) of ``epoch``."""
    return permutation(seed, epoch, size)[step * batch_size : (step + 1) * batch_size].tolist()
