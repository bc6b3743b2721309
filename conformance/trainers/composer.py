"""Composer's Trainer with ``device_train_microbatch_size``."""

from __future__ import annotations

from typing import Any

from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader

from conformance.job import Job

TITLE, VERSION_OF = "Composer", "mosaicml"
DOCS = "https://docs.mosaicml.com/projects/composer/en/stable/trainer/using_the_trainer.html"
FEATURES = {"ranks", "momentum", "clip"}


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
    if job.clip_norm:
        from composer.algorithms import GradientClipping

        given["algorithms"] = [GradientClipping(clipping_type="norm", clipping_threshold=job.clip_norm)]
    size = job.case.micro_batch_size * job.case.accumulation
    Trainer(
        model=Composed(job.module),
        train_dataloader=wrap(DataLoader(job.dataset, size, sampler=sampler, collate_fn=job.collate)),  # type: ignore[arg-type]
        optimizers=job.optimizer(),
        max_duration=f"{job.case.epochs}ep",
        device="cpu",
        device_train_microbatch_size=job.case.micro_batch_size,
        precision="fp32",
        progress_bar=False,
        **given,
    ).fit()
