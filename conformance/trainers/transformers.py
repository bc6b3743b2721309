"""transformers' Trainer, with the loss of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from conformance.job import Job

TITLE, VERSION_OF = "transformers Trainer", "transformers"
DOCS = "https://huggingface.co/docs/transformers/trainer"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "packing", "resume", "evaluate", "router"}


def train(job: Job, kind: type = Trainer, even_batches: bool = True, **given: Any) -> None:
    """Train with the arguments that the page on ``TrainingArguments`` names."""
    run(job, lambda: build(job, kind, even_batches, **given))


def run(job: Job, make: Callable[[], Trainer]) -> None:
    """Train with what ``make`` returns, twice if the case interrupts the run, and evaluate if it asks for that."""
    trainer = make()
    if job.needs("resume"):
        trainer.add_callback(StopAt(job.case.stop))
        trainer.train()
        job.restart()
        trainer = make()
    trainer.train(resume_from_checkpoint=job.needs("resume"))
    if job.needs("evaluate"):
        job.evaluation_loss = trainer.evaluate()["eval_loss"]


class StopAt(TrainerCallback):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def build(job: Job, kind: type, even_batches: bool, **given: Any) -> Trainer:
    """Return a trainer of the job's model."""
    optimizer = job.optimizer()
    if job.needs("packing"):
        from transformers import DataCollatorWithFlattening

        given["data_collator"] = DataCollatorWithFlattening()
    trainer = kind(
        model=job.module,
        args=arguments(job, TrainingArguments, accelerator_config={"even_batches": even_batches}),
        train_dataset=job.dataset,
        eval_dataset=job.evaluation_set,
        optimizers=(optimizer, job.linear(optimizer) if job.needs("schedule") else constant(optimizer)),
        **{"data_collator": job.collate} | given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def arguments(job: Job, kind: type, **more: Any) -> Any:
    """Return the arguments of a bare run in the order of the dataset."""
    off = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    off |= {"use_cpu": True, "bf16": False}  # TRL's default is bf16
    if job.needs("resume"):
        off |= {"save_strategy": "steps", "save_steps": job.case.stop}
    own = {
        "num_train_epochs": job.case.epochs,
        "per_device_train_batch_size": job.case.micro_batch_size,
        "per_device_eval_batch_size": job.case.micro_batch_size,
        "gradient_accumulation_steps": job.case.accumulation,
        "max_grad_norm": job.clip_norm or 0.0,
        "gradient_checkpointing": job.needs("checkpointing"),
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
    }
    return kind(str(job.folder), **off | own | more)


def constant(optimizer: Any) -> Any:
    """Return a schedule that keeps the learning rate."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: 1.0)
