"""A tiny Vision Transformer on digits that says when what of it begins: for ``benchmarks/launch.py``.

The first rank adds the lines ``NAME SECONDS_SINCE_1970`` and ``NAME_cpu SECONDS_OF_PROCESSOR`` to the file that
``LAUNCH_MARKS`` names; processes that are forked from it do not.
"""

import os
import time
from dataclasses import dataclass

RANK = next((os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ), "0")
PROCESS = os.getpid()


def mark(name: str) -> None:
    """Note the time, if this is the first rank itself."""
    if RANK == "0" and os.getpid() == PROCESS and "LAUNCH_MARKS" in os.environ:
        with open(os.environ["LAUNCH_MARKS"], "a") as file:
            file.write(f"{name} {time.time()}\n{name}_cpu {time.process_time()}\n")


mark("recipe")

from trainer import Memory, Optim, Recipe, Run, main  # noqa: E402
from trainer.data import Digits  # noqa: E402
from trainer.models import VisionTransformer  # noqa: E402


@dataclass
class MarkedDigits(Digits):
    def prepare(self, tokenizer=None):
        mark("data")
        super().prepare(tokenizer)
        mark("data_ready")


@dataclass
class MarkedTransformer(VisionTransformer):
    def build(self):
        module = super().build()
        mark("model_ready")
        return module

    def losses(self, module, batch):
        mark("forward")
        yield from super().losses(module, batch)


recipe = Recipe(
    model=MarkedTransformer("custom", patch_size=4, layers=2, heads=2, width=32, mlp_width=64),
    data=MarkedDigits(),
    optim=Optim("sgd", lr=0.1, momentum=0.9, clip_norm=1.0),
    batch_size=50,  # the last one has 37, which two ranks cannot halve
    epochs=1,
    memory=Memory(micro_batch_size=10, precision="64-true"),  # in float32, SGD would blow rounding up in 29 steps
    run=Run(accelerator="cpu", evaluate=False),
)

if __name__ == "__main__":
    main(recipe)
