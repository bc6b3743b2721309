"""What is disturbed: a tiny Vision Transformer with dropout on 120 digits, 18 steps, a checkpoint every 3."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer import Checkpoint, Loss, Memory, Optim, Recipe, Run, main
from trainer.data import Digits
from trainer.models import VisionTransformer

VARIABLE = "TRAINER_CHAOS"
"""Such as ``raise@1@3``: rank 1 raises in its third micro-batch. What to do, on which rank, and when (0: always)."""


class Few:
    """The first ``size`` samples of a dataset; the pixels of sample ``poisoned`` are NaN."""

    augmented = False

    def __init__(self, whole: Any, size: int, poisoned: int = -1) -> None:
        self.whole, self.size, self.poisoned = whole, size, poisoned

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        batch = self.whole.__getitems__(indices)
        if self.poisoned in indices:
            batch["pixel_values"][list(indices).index(self.poisoned)] = float("nan")
        return batch

    def describe(self, index: int) -> str:
        return self.whole.describe(index)

    def fingerprint(self) -> str:
        return f"{self.whole.fingerprint()} {self.size} {self.poisoned}"


@dataclass
class FewDigits(Digits):
    """120 digits to train on and 40 to test. The pixels of training sample ``poisoned`` are NaN, if it is given."""

    poisoned: int = -1

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.train, self.test = Few(self.train, 120, self.poisoned), Few(self.test, 40)


@dataclass
class Disturbed(VisionTransformer):
    """A Vision Transformer that does what :data:`VARIABLE` says."""

    micro_batches: int = 0

    def losses(self, module: Any, batch: Any) -> Iterator[Loss]:
        if module.training and VARIABLE in os.environ:
            self.micro_batches += 1
            what, rank, when = os.environ[VARIABLE].split("@")
            if rank == os.environ.get("RANK", "0") and int(when) in (0, self.micro_batches):
                disturb(what)
        time.sleep(0.01 * module.training)  # so that a run on a fast machine has not ended when a signal arrives
        yield from super().losses(module, batch)


def disturb(what: str) -> None:
    """Raise, hang for ever, or be slow."""
    if what == "raise":
        raise ZeroDivisionError("this is chaos")
    time.sleep(1e6 if what == "hang" else 0.03)


recipe = Recipe(
    model=Disturbed("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1),
    data=FewDigits(),
    optim=Optim("adamw", lr=0.01, clip_norm=1.0, schedule="cosine"),
    batch_size=20,
    epochs=3,
    memory=Memory(micro_batch_size=5),
    checkpoint=Checkpoint(every=3),
    run=Run(predict=False, accelerator="cpu"),
)

if __name__ == "__main__":
    main(recipe)
