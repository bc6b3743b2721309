"""axolotl: ``AxolotlTrainer``, which its builder makes for a causal language model that is trained in full.

Its command line reads a model, a tokenizer and data from a hub, so it is left out. Its pins of torch, numpy and
packages that this does not import are not installed.
"""

from __future__ import annotations

import os
from typing import Any

from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args import AxolotlTrainingArguments
from datasets import Dataset
from transformers import PrinterCallback

from conformance.job import Job, UnsupportedError
from conformance.trainers import transformers

TITLE, VERSION_OF = "axolotl", "axolotl"
DOCS = "https://docs.axolotl.ai/docs/getting-started.html"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "router"}


def train(job: Job) -> None:
    """Train with the arguments of the page, in the order of the dataset."""
    if job.case.task != "causal_lm":
        raise UnsupportedError("it trains causal language models")
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as accelerate launch --cpu; AxolotlTrainer drops use_cpu
    rows = [{key: value.tolist() for key, value in sample.items()} for sample in job.dataset]
    optimizer = job.optimizer()
    schedule = job.linear(optimizer) if job.needs("schedule") else transformers.constant(optimizer)
    trainer: Any = AxolotlTrainer(
        model=job.module,
        args=transformers.arguments(job, AxolotlTrainingArguments, curriculum_sampling=True),
        train_dataset=Dataset.from_list(rows).with_format("torch"),
        data_collator=job.collate,
        optimizers=(optimizer, schedule),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
