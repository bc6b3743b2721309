"""A tiny Vision Transformer that takes its time, and says after each step when that was: for benchmarks/restarts.py."""

import os
import time
from dataclasses import dataclass

from trainer import Checkpoint, Memory, Optim, Recipe, Run, main
from trainer.data import Digits
from trainer.models import VisionTransformer


@dataclass
class Paced(VisionTransformer):
    """The first rank appends its pid and the time to the file ``log`` when a micro-batch begins.

    Args:
        pause: seconds before each micro-batch, of which a step has one.
        log: the file; null for none.
    """

    pause: float = 0.0
    log: str | None = None

    def losses(self, module, batch):
        if module.training and self.log and os.environ.get("LOCAL_RANK", "0") == "0":
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {time.time()}\n")
        time.sleep(self.pause)
        yield from super().losses(module, batch)


recipe = Recipe(
    model=Paced("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1),
    data=Digits(),
    optim=Optim("adamw", lr=1e-3),
    batch_size=24,
    epochs=1_000_000,
    memory=Memory(micro_batch_size=24),
    checkpoint=Checkpoint(every=10),
    run=Run(evaluate=False, predict=False, accelerator="cpu"),
)

if __name__ == "__main__":
    main(recipe)
