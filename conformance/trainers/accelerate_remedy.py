"""Accelerate with items counted ahead, as its page on samples of variable size says."""

from __future__ import annotations

import contextlib
import math

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from conformance.cases import loss_from_logits, weight_of_labels
from conformance.job import Job

TITLE, VERSION_OF = "Accelerate, items counted, even_batches=False", "accelerate"
DOCS = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation#gradient-accumulation-on-training-samples-of-variable-size"
FEATURES = {"ranks", "clip", "momentum"}


def train(job: Job) -> None:
    """Train with the loop of the page."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=job.case.accumulation,
        dataloader_config=DataLoaderConfiguration(even_batches=False),  # otherwise samples are repeated
    )
    module, optimizer, loader = accelerator.prepare(job.module, job.optimizer(), job.loader())
    for _ in range(job.case.epochs):
        batches, remaining = iter(loader), len(loader)
        for _ in range(math.ceil(remaining / job.case.accumulation)):
            window = [next(batches) for _ in range(min(job.case.accumulation, remaining))]
            remaining -= len(window)
            own = sum(weight_of_labels(job.case, batch["labels"]) for batch in window)
            total = accelerator.gather(torch.tensor(own, dtype=torch.float64)).sum().item()
            for number, batch in enumerate(window, start=1):
                is_last = number == len(window)
                with contextlib.nullcontext() if is_last else accelerator.no_sync(module):
                    logits = module(**batch)["logits"]
                    loss = loss_from_logits(job.case, logits, batch["labels"])[0]
                    # backward divides by the micro-batches of a step, and DDP by the ranks
                    accelerator.backward(loss * job.case.accumulation * accelerator.num_processes / total)
            if job.clip_norm:
                accelerator.clip_grad_norm_(module.parameters(), job.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
