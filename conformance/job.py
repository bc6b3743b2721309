"""What an adapter is given: a case with its model, data and settings, ready to train."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Sampler

from conformance.cases import IGNORED, LEARNING_RATE, Batch, Case, Sample, collate
from conformance.verdict import DECAY, MOMENTUM


class UnsupportedError(Exception):
    """The trainer has no documented way to do this."""


@dataclass
class Job:
    """A case for one process.

    Args:
        case: what is to be trained.
        folder: where the trainer may write.
        recorder: sees every optimizer of torch by itself; another one calls its ``keep``.
        average: what the adapter returns in the case ``ema``: averages of the weights, by name.
        evaluation_loss: what the adapter returns in cases that need ``evaluate``: the final loss of ``evaluation_set``.
    """

    case: Case
    folder: Path
    recorder: Any = None
    average: dict[str, Tensor] | None = None
    evaluation_loss: float | None = None

    @cached_property
    def module(self) -> nn.Module:
        """The model; forward takes the entries of a batch by name and returns ``loss``, a mean, and ``logits``."""
        return self.case.build()

    @cached_property
    def dataset(self) -> list[Sample]:
        """The samples, to be trained on in this order."""
        return self.case.dataset()

    def prompted(self) -> list[Sample]:
        """Return the samples without a label of the first token, which is a part of the prompt for some trainers."""
        if self.case.task != "causal_lm":
            return self.dataset
        ignored = torch.tensor([IGNORED])
        return [one | {"labels": torch.cat([ignored, one["labels"][1:]])} for one in self.dataset]

    @cached_property
    def evaluation_set(self) -> list[Sample]:
        """The samples to evaluate on after training."""
        return self.case.evaluation_set()

    @property
    def collate(self) -> Callable[[list[Sample]], Batch]:
        """Makes a micro-batch of samples."""
        return collate

    def loader(self, sampler: Sampler | None = None, dataset: list[Sample] | None = None) -> DataLoader:
        """Return a loader of micro-batches, of the samples to be trained on unless ``dataset`` is given."""
        return DataLoader(dataset or self.dataset, self.case.micro_batch_size, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]

    def optimizer(self, module: nn.Module | None = None) -> Optimizer:
        """Return SGD for the parameters that are trained, with momentum and decay if the case needs them."""
        parameters = [one for one in (module or self.module).parameters() if one.requires_grad]
        more = {"momentum": MOMENTUM, "weight_decay": DECAY} if self.needs("momentum") else {}
        return SGD(parameters, lr=LEARNING_RATE, **more)

    @property
    def clip_norm(self) -> float | None:
        """Norm to clip the gradient to."""
        return self.case.clip_norm if self.needs("clip") else None

    def restart(self) -> None:
        """Forget the model, as after the end of the process; a new one has other weights until they are loaded."""
        self.module = self.case.build(seed=2)
        self.recorder.watch(self.module)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return len(self.case.windows())

    def needs(self, feature: str) -> bool:
        """Return whether the case needs a feature."""
        return feature in self.case.needs

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(os.environ.get("RANK", "0"))

    def linear(self, optimizer: Optimizer) -> Any:
        """Return a schedule from the learning rate to zero over the optimizer steps."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / self.steps)
