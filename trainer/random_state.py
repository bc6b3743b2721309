"""The state of the random generators of a process, as JSON.

The engine seeds torch's generator before every micro-step and needs none of this. It is for models and datasets of
one's own that draw from ``random``, NumPy or torch in between.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainer.engine.order import derive_seed


def seed_random_state(seed: int, rank: int) -> None:
    """Let every start of a run begin with the same generators, unlike on every rank."""
    random.seed(derive_seed(seed, rank, 0))
    np.random.seed(derive_seed(seed, rank, 1) % 2**32)
    torch.manual_seed(derive_seed(seed, rank, 2))


def random_state(device: torch.device) -> dict[str, Any]:
    """Of Python, NumPy (its global generator), torch on the CPU and, where it is a GPU, on ``device``."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators into ``state``; that of a GPU only where there is one."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
