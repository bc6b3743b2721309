"""This project's ``fit``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

import trainer
from conformance.cases import LEARNING_RATE, collate, loss_from_logits, weight_of_labels
from conformance.job import Job
from conformance.verdict import DECAY, DECAY_OF_AVERAGE, MOMENTUM
from trainer import Checkpoint, Data, Loss, Memory, Model, Optim, Recipe, Run, fit

TITLE, VERSION_OF = "trainer", "exactbatch-trainer"
DOCS = "../your-own-model.md"
VERSION = trainer.__version__
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "fsdp2"}
FEATURES |= {"skip", "ema", "resume", "evaluate", "router"}
SHUFFLES = True


@dataclass
class CaseModel(Model):
    """The model of a case: the sum of the losses of a micro-batch, and their weight."""

    job: ClassVar[Job]

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

    job: ClassVar[Job]

    def prepare(self, tokenizer: Any = None, model: Any = None) -> None:
        self.train = self.job.dataset
        self.val = self.job.evaluation_set if self.job.needs("evaluate") else None

    def collate(self, samples: Sequence[Any]) -> Any:
        return collate(samples)


def train(job: Job, model: Model | None = None, data: Data | None = None) -> None:
    """Train with a recipe."""
    CaseModel.job = CaseData.job = job
    case, decay = job.case, {"momentum": MOMENTUM, "weight_decay": DECAY} if job.needs("momentum") else {}
    average = DECAY_OF_AVERAGE if job.needs("ema") else None
    schedule = "linear" if job.needs("schedule") else "constant"
    memory = Memory(
        micro_batch_size=case.micro_batch_size,
        precision="64-true" if case.dtype == torch.float64 else "bf16-true",
        strategy="fsdp" if job.needs("fsdp2") else "auto",
        activation_checkpointing="full" if job.needs("checkpointing") else "none",
    )
    recipe = Recipe(
        model=model or CaseModel(),
        data=data or CaseData(),
        optim=Optim("sgd", lr=LEARNING_RATE, schedule=schedule, clip_norm=job.clip_norm, ema=average, **decay),
        batch_size=case.micro_batch_size * case.accumulation * case.ranks,
        epochs=case.epochs,
        memory=memory,
        checkpoint=Checkpoint(every=case.stop or None),
        run=Run(accelerator="cpu", dir=str(job.folder / "run"), progress=False, predict=False),
    )
    if job.needs("resume"):
        fit(recipe.replace(max_steps=case.stop))
        job.restart()
        recipe = recipe.replace(run=replace(recipe.run, resume="auto", allow_change=["max_steps"]))
    run = fit(recipe)
    if job.needs("ema"):
        job.average = dict(run.model.named_parameters())
    if job.needs("evaluate"):
        job.evaluation_loss = run.metrics["val"]["loss"]
