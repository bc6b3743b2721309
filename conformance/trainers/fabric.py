"""Lightning Fabric's documented loop, with two corrections.

The page's loop takes its first step after one micro-batch, and does not divide the losses
(docs/upstream/lightning-fabric-loop.md).
"""

from __future__ import annotations

from lightning.fabric import Fabric

from conformance.job import Job

TITLE, VERSION_OF = "Fabric", "lightning"
DOCS = "https://lightning.ai/docs/fabric/stable/advanced/gradient_accumulation.html"
FEATURES = {"ranks", "clip", "momentum", "schedule", "router"}


def train(job: Job) -> None:
    """Train with the loop of the page."""
    fabric = Fabric(accelerator="cpu", devices=job.case.ranks, strategy="ddp" if job.case.ranks > 1 else "auto")
    fabric.launch()
    module, optimizer = fabric.setup(job.module, job.optimizer())
    schedule = job.linear(optimizer)
    loader = fabric.setup_dataloaders(job.loader())
    iteration = 0
    for _ in range(job.case.epochs):
        for batch in loader:
            iteration += 1
            is_accumulating = iteration % job.case.accumulation != 0
            with fabric.no_backward_sync(module, enabled=is_accumulating):
                fabric.backward(module(**batch)["loss"] / job.case.accumulation)
            if not is_accumulating:
                if job.clip_norm:
                    fabric.clip_gradients(module, optimizer, max_norm=job.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
                if job.needs("schedule"):
                    schedule.step()
