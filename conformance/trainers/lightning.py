"""Lightning's Trainer with ``accumulate_grad_batches``."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.optim import Optimizer

from conformance.job import Job
from conformance.verdict import DECAY_OF_AVERAGE

TITLE, VERSION_OF = "Lightning Trainer", "lightning"
DOCS = "https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html#accumulate-gradients"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "ema", "resume", "evaluate", "router"}
SHUFFLES = True  # its sampler for several ranks does


class Lit(LightningModule):
    """A module with the model's own loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.module = job, job.module

    def training_step(self, batch: Any) -> Any:
        return self.module(**batch)["loss"]

    def validation_step(self, batch: Any) -> None:
        self.log("loss", self.module(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        optimizer: Optimizer = self.job.optimizer()
        if not self.job.needs("schedule"):
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.job.linear(optimizer), "interval": "step"}}


class Interruption(Callback):
    """Ends a run after a step, as a crash does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise InterruptedError


def train(job: Job, kind: type = Lit, loader: Any = None, **settings: Any) -> None:
    """Train with the settings of the page."""
    if job.needs("checkpointing"):
        job.module.gradient_checkpointing_enable()  # type: ignore[operator]
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    own = {"accumulate_grad_batches": job.case.accumulation, "gradient_clip_val": job.clip_norm}
    own |= {"accelerator": "cpu", "devices": job.case.ranks, "strategy": "ddp" if job.case.ranks > 1 else "auto"}
    average = EMAWeightAveraging(decay=DECAY_OF_AVERAGE)
    own |= {"max_epochs": job.case.epochs, "callbacks": [average] if job.needs("ema") else None}
    saved, loader = None, loader or job.loader()
    if job.needs("resume"):
        checkpoint = ModelCheckpoint(job.folder, "state", every_n_train_steps=job.case.stop)
        more = {"callbacks": [checkpoint, Interruption(job.case.stop)], "enable_checkpointing": True}
        with suppress(InterruptedError):
            Trainer(**off | own | settings | more).fit(kind(job), loader)
        saved = job.folder / "state.ckpt"
        job.restart()
    trainer, module = Trainer(**off | own | settings), kind(job)
    trainer.fit(module, loader, ckpt_path=saved)
    if job.needs("ema"):  # the callback copies the average into the model at the end
        job.average = dict(job.module.named_parameters())
    if job.needs("evaluate"):
        job.evaluation_loss = trainer.validate(module, job.loader(dataset=job.evaluation_set), verbose=False)[0]["loss"]
