"""transformers' Trainer with ``compute_loss_func``, as its page on custom losses says."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from conformance.cases import loss_from_logits, weight_of_labels
from conformance.job import Job
from conformance.trainers import transformers

TITLE, VERSION_OF = "transformers Trainer, compute_loss_func, even_batches=False", "transformers"
DOCS = "https://huggingface.co/docs/transformers/trainer_customize"
FEATURES = transformers.FEATURES - {"router"}


def train(job: Job) -> None:
    """Divide the sum of the losses by the number of items that the trainer counts in the window."""

    def compute_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        items = num_items_in_batch or weight_of_labels(job.case, labels)  # an evaluation counts no items
        return loss_from_logits(job.case, outputs["logits"], labels)[0] / items

    transformers.train(job, even_batches=False, compute_loss_func=compute_loss)  # True repeats samples
