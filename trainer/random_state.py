"""The state of the random generators of a process, as JSON.

The engine seeds torch's generator before every micro-step and needs none of this. It is for models of one's own that
draw from ``random``, NumPy or torch in between, and for datasets that do so in this process (``data.workers`` 0).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainer.engine.events import Counters, Listener
from trainer.engine.order import derive_seed
from trainer.engine.step import StepResult


def seed_random_state(seed: int, rank: int) -> None:
    """Let every start of a run begin with the same generators, unlike on every rank."""
    random.seed(derive_seed(seed, rank, 0))
    np.random.seed(derive_seed(seed, rank, 1) % 2**32)
    torch.manual_seed(derive_seed(seed, rank, 2))


class RandomState(Listener):
    """The generators as they are between two steps, before the next batch is loaded: what a checkpoint keeps.

    When a step is saved the next batch is there already, and loading it may have drawn numbers. A run that goes on from
    there loads it again, and must draw the same.

    Args:
        device: whose generator is kept besides those of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resumed: Mapping[str, Any] | None = None
        """What to begin with: put back when training starts, after whatever was drawn in its preparation."""
        self._note()

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        if self.resumed is not None:
            restore_random_state(self.resumed, self.device)
        self._note()

    def on_step(self, counters: Counters, result: StepResult) -> None:
        self._note()

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        self._note()

    def to_json(self) -> dict[str, Any]:
        """As :func:`restore_random_state` takes it."""
        (version, numbers, gauss), (name, keys, *rest), on_host, on_device = self._state
        state: dict[str, Any] = {
            "python": [version, list(numbers), gauss],
            "numpy": [name, np.asarray(keys).tolist(), *rest],
            "torch": _text(on_host),
        }
        return state if on_device is None else state | {"cuda": _text(on_device)}

    def _note(self) -> None:
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._state: Any = random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators into ``state``; that of a GPU only where there is one."""
    version, numbers, gauss = state["python"]
    if not isinstance(gauss, float | None):  # which Python believes
        raise TypeError(f"the generator's next number is {gauss!r}")
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
