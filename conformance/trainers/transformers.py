"""transformers' Trainer, with the loss of the model."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, Trainer, TrainingArguments

from conformance.job import Job

TITLE, VERSION_OF = "transformers Trainer", "transformers"
DOCS = "https://huggingface.co/docs/transformers/trainer"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "packing"}


def train(job: Job, kind: type = Trainer, even_batches: bool = True, **given: Any) -> None:
    """Train with the arguments that the page on ``TrainingArguments`` names."""
    optimizer = job.optimizer()
    if job.needs("packing"):
        from transformers import DataCollatorWithFlattening

        given["data_collator"] = DataCollatorWithFlattening()
    trainer = kind(
        model=job.module,
        args=arguments(job, TrainingArguments, accelerator_config={"even_batches": even_batches}),
        train_dataset=job.dataset,
        optimizers=(optimizer, job.linear(optimizer) if job.needs("schedule") else constant(optimizer)),
        **{"data_collator": job.collate} | given,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def arguments(job: Job, kind: type, **more: Any) -> Any:
    """Return the arguments of a bare run in the order of the dataset."""
    off = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    off |= {"use_cpu": True, "bf16": False}  # TRL's default is bf16
    own = {
        "num_train_epochs": job.case.epochs,
        "per_device_train_batch_size": job.case.micro_batch_size,
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
