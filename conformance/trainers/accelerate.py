"""Accelerate's ``accumulate``."""

from __future__ import annotations

from accelerate import Accelerator

from conformance.job import Job

TITLE, VERSION_OF = "Accelerate", "accelerate"
DOCS = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "resume", "router"}


def train(job: Job) -> None:
    """Train with the loop of the page; a run is resumed as the page on checkpoints says."""
    if not job.needs("resume"):
        train_until(job)
        return
    train_until(job, stop=job.case.stop)
    job.restart()
    train_until(job, resumed_at=job.case.stop)


def train_until(job: Job, stop: int = 0, resumed_at: int = 0) -> None:
    """Train until step ``stop`` and save the state, or from a saved state at step ``resumed_at`` to the end."""
    if job.needs("checkpointing"):
        job.module.gradient_checkpointing_enable()  # type: ignore[operator]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.case.accumulation)
    optimizer = job.optimizer()
    schedule = job.linear(optimizer)
    # split_batches=False: the scheduler takes a step for each process, as the page on schedulers says
    module, optimizer, loader, schedule = accelerator.prepare(job.module, optimizer, job.loader(), schedule)
    skipped = 0
    if resumed_at:
        accelerator.load_state(str(job.folder / "state"))
        skipped = resumed_at * job.case.accumulation
    for _ in range(job.case.epochs):
        for number, batch in enumerate(accelerator.skip_first_batches(loader, skipped) if skipped else loader, 1):
            with accelerator.accumulate(module):
                accelerator.backward(module(**batch)["loss"])
                if job.clip_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), job.clip_norm)
                optimizer.step()
                if job.needs("schedule"):
                    schedule.step()
                optimizer.zero_grad()
            if stop and number == stop * job.case.accumulation:
                accelerator.save_state(str(job.folder / "state"))
                return
        skipped = 0
