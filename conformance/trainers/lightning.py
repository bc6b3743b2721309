"""Lightning's Trainer with ``accumulate_grad_batches``."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from torch.optim import Optimizer

from conformance.job import Job

TITLE, VERSION_OF = "Lightning Trainer", "lightning"
DOCS = "https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#accumulate-gradients"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing"}


class Lit(LightningModule):
    """A module with the model's own loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.module = job, job.module

    def training_step(self, batch: Any) -> Any:
        return self.module(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        optimizer: Optimizer = self.job.optimizer()
        if not self.job.needs("schedule"):
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.job.linear(optimizer), "interval": "step"}}


def train(job: Job, kind: type = Lit, loader: Any = None, **settings: Any) -> None:
    """Train with the settings of the page."""
    if job.needs("checkpointing"):
        job.module.gradient_checkpointing_enable()  # type: ignore[operator]
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    own = {"accumulate_grad_batches": job.case.accumulation, "gradient_clip_val": job.clip_norm}
    strategy = "ddp" if job.case.ranks > 1 else "auto"
    Trainer(
        accelerator="cpu",
        devices=job.case.ranks,
        strategy=strategy,
        max_epochs=job.case.epochs,
        **off | own | settings,
    ).fit(kind(job), loader or job.loader())
