"""Composer's Trainer with ``device_train_microbatch_size``."""

from __future__ import annotations

from typing import Any

from composer import Trainer
from composer.algorithms import EMA, GradientClipping
from composer.models import ComposerModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader

from conformance.job import Job
from conformance.verdict import DECAY_OF_AVERAGE

TITLE, VERSION_OF = "Composer", "mosaicml"
DOCS = "https://docs.mosaicml.com/projects/composer/en/stable/trainer/using_the_trainer.html"
FEATURES = {"ranks", "momentum", "clip", "ema", "resume", "router"}


class Composed(ComposerModel):
    """A model whose forward returns its loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return self.module(**batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs["loss"]


def train(job: Job, wrap: Any = lambda loader: loader, **given: Any) -> None:
    """Train with the arguments of the page; its data loader has the whole batch of a rank."""
    sampler = None
    if job.case.ranks > 1:
        dist.initialize_dist("cpu")
        sampler = dist.get_sampler(job.dataset, shuffle=False)
    average = EMA(half_life=None, smoothing=DECAY_OF_AVERAGE, update_interval="1ba")
    given["algorithms"] = [average] if job.needs("ema") else []
    if job.clip_norm:
        given["algorithms"] += [GradientClipping(clipping_type="norm", clipping_threshold=job.clip_norm)]
    size = job.case.micro_batch_size * job.case.accumulation

    def build(**more: Any) -> Trainer:
        return Trainer(
            model=Composed(job.module),
            train_dataloader=wrap(DataLoader(job.dataset, size, sampler=sampler, collate_fn=job.collate)),  # type: ignore[arg-type]
            optimizers=job.optimizer(),
            device="cpu",
            device_train_microbatch_size=job.case.micro_batch_size,
            precision="fp32",
            progress_bar=False,
            **{"max_duration": f"{job.case.epochs}ep"} | given | more,
        )

    saved = None
    if job.needs("resume"):
        trainer = build(max_duration=f"{job.case.stop}ba")
        trainer.fit()
        saved = trainer.save_checkpoint(str(job.folder / "state.pt"))
        job.restart()
    build(load_path=saved).fit()
    if job.needs("ema"):
        job.average = {name.removeprefix("module."): one for name, one in average.ema_model.named_parameters()}
