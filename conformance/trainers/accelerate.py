"""Accelerate's ``accumulate``."""

from __future__ import annotations

from accelerate import Accelerator

from conformance.job import Job

TITLE, VERSION_OF = "Accelerate", "accelerate"
DOCS = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing"}


def train(job: Job) -> None:
    """Train with the loop of the page."""
    if job.needs("checkpointing"):
        job.module.gradient_checkpointing_enable()  # type: ignore[operator]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.case.accumulation)
    optimizer = job.optimizer()
    schedule = job.linear(optimizer)
    # split_batches=False: the scheduler takes a step for each process, as the page on schedulers says
    module, optimizer, loader, schedule = accelerator.prepare(job.module, optimizer, job.loader(), schedule)
    for _ in range(job.case.epochs):
        for batch in loader:
            with accelerator.accumulate(module):
                accelerator.backward(module(**batch)["loss"])
                if job.clip_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), job.clip_norm)
                optimizer.step()
                if job.needs("schedule"):
                    schedule.step()
                optimizer.zero_grad()
