"""Composer with ``accumulate_train_batch_on_tokens``: micro-batches weigh by their tokens."""

from __future__ import annotations

from typing import Any

from composer.core import DataSpec

from conformance.cases import weight_of_labels
from conformance.job import Job, UnsupportedError
from conformance.trainers import composer

TITLE, VERSION_OF = "Composer, accumulate_train_batch_on_tokens", "mosaicml"
DOCS = "https://docs.mosaicml.com/projects/composer/en/stable/api_reference/generated/composer.Trainer.html"
FEATURES = composer.FEATURES


def train(job: Job) -> None:
    """Count the items of a micro-batch as its tokens."""

    if job.case.model == "weighted":
        raise UnsupportedError("a number of tokens is an integer, and a weight of classes is not")

    def count(batch: Any) -> int:
        return int(weight_of_labels(job.case, batch["labels"]))

    def wrap(loader: Any) -> DataSpec:
        return DataSpec(loader, get_num_tokens_in_batch=count)

    composer.train(job, wrap, accumulate_train_batch_on_tokens=True)
