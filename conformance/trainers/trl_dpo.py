"""TRL's DPOTrainer."""

from __future__ import annotations

from trl import DPOConfig, DPOTrainer

from conformance.job import Job, UnsupportedError
from conformance.trainers import transformers, trl
from conformance.words import words

TITLE, VERSION_OF = "TRL DPOTrainer", "trl"
DOCS = "https://huggingface.co/docs/trl/dpo_trainer"
FEATURES = {"preference"}


def train(job: Job) -> None:
    """Train with the arguments of the page; the reference model is a copy of the model."""
    if job.case.task != "preference":
        raise UnsupportedError("it trains on preferences")
    rows = [{name: words(tokens) for name, tokens in sample.items()} for sample in job.dataset]
    transformers.run(job, lambda: trl.build(job, DPOTrainer, DPOConfig, rows, ref_model=job.case.build()))
