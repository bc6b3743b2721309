"""Lightning's Trainer with manual optimization, as its page on it accumulates."""

from __future__ import annotations

from typing import Any

from conformance.job import Job
from conformance.trainers import lightning

TITLE, VERSION_OF = "Lightning Trainer, manual optimization", "lightning"
DOCS = "https://lightning.ai/docs/pytorch/stable/model/manual_optimization.html#gradient-accumulation"
FEATURES = {"ranks", "momentum", "router"}
SHUFFLES = lightning.SHUFFLES


class ManualLit(lightning.Lit):
    """The module of the page."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.manual_backward(self.module(**batch)["loss"] / self.job.case.accumulation)
        if (batch_idx + 1) % self.job.case.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()


def train(job: Job) -> None:
    """Train with the module of the page."""
    lightning.train(job, ManualLit, accumulate_grad_batches=1)
