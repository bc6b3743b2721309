"""Lightning's Trainer with this project's drop-in."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from conformance.cases import loss_from_logits
from conformance.job import Job
from conformance.trainers import lightning
from trainer.integrations.lightning import ExactAccumulation

TITLE, VERSION_OF = "Lightning Trainer, with our drop-in", "lightning"
DOCS = "../drop-in.md#lightning"
FEATURES = {"ranks", "clip", "momentum", "schedule"}
SHUFFLES = True  # the batch sampler of the page has an order of its own


class ExactLit(ExactAccumulation, lightning.Lit):
    """The module of the page."""

    def training_step(self, batch: Any) -> Any:
        total, weight = loss_from_logits(self.job.case, self.module(**batch)["logits"], batch["labels"])
        return self.share(total, weight)


def train(job: Job) -> None:
    """Train with the module of the page; on several ranks with its batch sampler, which repeats no sample."""
    loader, case = None, job.case
    if case.ranks > 1:
        size, own = case.micro_batch_size * case.ranks, range(case.samples)[job.rank :: case.ranks]
        count = -(-case.samples // size)
        batches = [own[number::count] for number in range(count)]
        loader = DataLoader(job.dataset, batch_sampler=batches, collate_fn=job.collate)  # type: ignore[arg-type]
    lightning.train(job, ExactLit, loader, use_distributed_sampler=False)
