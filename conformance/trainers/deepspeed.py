"""DeepSpeed's ``initialize``, ``engine.backward`` and ``engine.step``."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch

from conformance.job import Job

TITLE, VERSION_OF = "DeepSpeed", "deepspeed"
DOCS = "https://www.deepspeed.ai/getting-started/"
FEATURES = {"ranks", "momentum", "clip", "router"}
DTYPE = torch.float32
SHUFFLES = True


def train(job: Job) -> None:
    """Train with the loop of the page, in float32: DeepSpeed rejects gradients in float64."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first
    deepspeed.init_distributed("gloo")
    case = job.case
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case.micro_batch_size,
        "gradient_accumulation_steps": case.accumulation,
        "train_batch_size": case.micro_batch_size * case.accumulation * case.ranks,
    }
    if job.clip_norm:
        config["gradient_clipping"] = job.clip_norm
    engine, _, loader, _ = deepspeed.initialize(
        model=job.module,
        optimizer=job.optimizer(),
        config=config,
        training_data=job.dataset,
        collate_fn=job.collate,
    )
    for _ in range(case.epochs):
        for batch in loader:
            loss = engine(**batch)["loss"]
            engine.backward(loss)
            engine.step()
