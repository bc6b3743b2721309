"""A custom loop with this project's ``AccumulatingOptimizer``."""

from __future__ import annotations

import trainer
from conformance.cases import loss_from_logits
from conformance.job import Job
from trainer import AccumulatingOptimizer

TITLE, VERSION_OF = "A loop with our AccumulatingOptimizer", "exactbatch-trainer"
DOCS = "../your-own-loop.md"
VERSION = trainer.__version__
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing"}


def train(job: Job) -> None:
    """Train with the loop of the page; the ranks take micro-batches in turn, and a missing one has the weight 0."""
    case, size = job.case, job.case.micro_batch_size
    if job.needs("checkpointing"):
        job.module.gradient_checkpointing_enable()  # type: ignore[operator]
    optimizer = AccumulatingOptimizer(job.optimizer(), steps=case.accumulation, clip_norm=job.clip_norm)
    scheduler = job.linear(optimizer)
    starts = range(0, case.samples, size * case.ranks)  # of micro-batches that the ranks compute at the same time
    for start in [*starts] * case.epochs:
        first = start + job.rank * size
        samples, weight = job.dataset[first : first + size], 0.0
        if samples:
            batch = job.collate(samples)
            total, weight = loss_from_logits(case, job.module(**batch)["logits"], batch["labels"])
            total.backward()
        has_updated = optimizer.step(weight=weight)
        if start == starts[-1]:  # the epoch ends, perhaps within a window
            has_updated |= optimizer.flush()
        if has_updated and job.needs("schedule"):
            scheduler.step()
        optimizer.zero_grad()
