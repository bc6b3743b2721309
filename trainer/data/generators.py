"""The global random generators that a sample may draw from: seeded for it, and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = 0xFFFFFFFF


def seed_generators(seed: int) -> None:
    """Seed torch's generator of the CPU, NumPy's global one and that of ``random``; ``seed`` is in [0, 2^63)."""
    # Not torch.manual_seed: it would seed the GPUs too, and dropout there with them.
    torch.random.default_generator.manual_seed(seed)
    random.seed(seed)
    # Both are a Mersenne Twister: of the same words, NumPy would draw the numbers that random draws.
    np.random.seed([seed & _MASK, seed >> 32, 1])


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put the three generators back into the state that they are in now."""
    generator = torch.random.default_generator
    before = generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
