"""TRL's SFTTrainer with ``even_batches=False``, so that no sample is repeated."""

from __future__ import annotations

from conformance.job import Job
from conformance.trainers import trl

TITLE, VERSION_OF = "TRL SFTTrainer, even_batches=False", "trl"
DOCS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments.accelerator_config"
FEATURES = trl.FEATURES


def train(job: Job) -> None:
    """Train with the argument of the page."""
    trl.train(job, even_batches=False)
