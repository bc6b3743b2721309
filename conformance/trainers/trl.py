"""TRL's SFTTrainer on tokens and labels that are there already."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import Trainer
from trl import SFTConfig, SFTTrainer

from conformance.job import Job, UnsupportedError
from conformance.trainers import transformers
from conformance.words import tokenizer

TITLE, VERSION_OF = "TRL SFTTrainer", "trl"
DOCS = "https://huggingface.co/docs/trl/sft_trainer"
FEATURES = transformers.FEATURES


def train(job: Job, kind: type = SFTTrainer, even_batches: bool = True) -> None:
    """Train with the arguments of the page."""
    if job.case.task != "causal_lm":
        raise UnsupportedError("it trains causal language models")
    rows, evaluated = (
        [{key: value.tolist() for key, value in sample.items()} for sample in samples]
        for samples in (job.dataset, job.evaluation_set)
    )
    settings = {"padding_free": job.needs("packing"), "accelerator_config": {"even_batches": even_batches}}
    given = {"eval_dataset": Dataset.from_list(evaluated)}
    transformers.run(job, lambda: build(job, kind, SFTConfig, rows, settings, **given))


def build(
    job: Job, kind: type, config: type, rows: list[Any], settings: dict[str, Any] | None = None, **given: Any
) -> Trainer:
    """Return a trainer of the job's model on ``rows``."""
    optimizer = job.optimizer()
    return kind(
        model=job.module,
        args=transformers.arguments(job, config, max_length=None, **settings or {}),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        optimizers=(optimizer, job.linear(optimizer) if job.needs("schedule") else transformers.constant(optimizer)),
        **given,
    )
