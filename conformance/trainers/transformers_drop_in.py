"""transformers' Trainer with this project's drop-in."""

from __future__ import annotations

from conformance.cases import CLASS_WEIGHTS
from conformance.job import Job
from conformance.trainers import transformers
from trainer.integrations.transformers import ExactTrainer

TITLE, VERSION_OF = "transformers Trainer, with our drop-in", "transformers"
DOCS = "../drop-in.md"
FEATURES = transformers.FEATURES


def train(job: Job) -> None:
    """Train with the class of the drop-in."""
    transformers.train(job, ExactTrainer, class_weights=CLASS_WEIGHTS if job.case.model == "weighted" else None)
