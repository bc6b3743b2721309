"""TRL's SFTTrainer with this project's drop-in."""

from __future__ import annotations

from trl import SFTTrainer

from conformance.job import Job
from conformance.trainers import trl
from trainer.integrations.transformers import ExactGradients

TITLE, VERSION_OF = "TRL SFTTrainer, with our drop-in", "trl"
DOCS = "../drop-in.md"
FEATURES = trl.FEATURES


class ExactSFTTrainer(ExactGradients, SFTTrainer):
    """The class of the page."""


def train(job: Job) -> None:
    """Train with the class of the page."""
    trl.train(job, ExactSFTTrainer)
