"""This project's ``fit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import trainer
from conformance.cases import LEARNING_RATE, collate, loss_from_logits, weight_of_labels
from conformance.job import Job
from conformance.verdict import DECAY, MOMENTUM
from trainer import Checkpoint, Data, Loss, Memory, Model, Optim, Recipe, Run, fit

TITLE, VERSION_OF = "trainer", "exactbatch-trainer"
DOCS = "../your-own-model.md"
VERSION = trainer.__version__
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "fsdp2"}
SHUFFLES = True


@dataclass
class CaseModel(Model):
    """The model of a case: the sum of the losses of a micro-batch, and their weight."""

    job: Any = None

    @property
    def blocks(self) -> Sequence[type]:  # type: ignore[override]
        return tuple(
            {type(one) for one in self.job.module.modules() if type(one).__name__.endswith(("Layer", "Block"))}
        )

    def build(self) -> nn.Module:
        return self.job.module

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        outputs = module(**batch)
        total, weight = loss_from_logits(self.job.case, outputs["logits"], batch["labels"])
        if self.job.case.model == "mixtral":  # with the router's loss, which is no sum over samples
            total = outputs["loss"] * weight
        yield Loss(total, weight)

    def weigh(self, batch: Any) -> dict[str, float]:
        return {"loss": weight_of_labels(self.job.case, batch["labels"])}


@dataclass
class CaseData(Data):
    """The samples of a case."""

    job: Any = None

    def prepare(self, tokenizer: Any = None, model: Any = None) -> None:
        self.train = self.job.dataset

    def collate(self, samples: Sequence[Any]) -> Any:
        return collate(samples)


def train(job: Job, model: Model | None = None) -> None:
    """Train with a recipe."""
    case, decay = job.case, {"momentum": MOMENTUM, "weight_decay": DECAY} if job.needs("momentum") else {}
    schedule = "linear" if job.needs("schedule") else "constant"
    memory = Memory(
        micro_batch_size=case.micro_batch_size,
        precision="64-true",
        strategy="fsdp" if job.needs("fsdp2") else "auto",
        activation_checkpointing="full" if job.needs("checkpointing") else "none",
    )
    recipe = Recipe(
        model=model or CaseModel(job),
        data=CaseData(job),
        optim=Optim("sgd", lr=LEARNING_RATE, schedule=schedule, clip_norm=job.clip_norm, **decay),
        batch_size=case.micro_batch_size * case.accumulation * case.ranks,
        epochs=case.epochs,
        memory=memory,
        checkpoint=Checkpoint(every=None),
        run=Run(accelerator="cpu", dir=str(job.folder / "run"), progress=False, predict=False),
    )
    fit(recipe)
