"""ms-swift: its trainers for ``sft`` and for ``seq_cls``, on a model and tokens that are there already.

Its command line reads a model and a tokenizer from a hub, so it is left out. The template is the library's, without a
tokenizer; only its collator is replaced, because the samples are tokens. It never has a label of the first token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swift.template import Template, TemplateMeta
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers import PrinterCallback

from conformance.job import Job, UnsupportedError
from conformance.trainers.transformers import constant

TITLE, VERSION_OF = "ms-swift", "ms-swift"
DOCS = "https://swift.readthedocs.io/en/latest/Instruction/Pre-training-and-Fine-tuning.html"
FEATURES = {"ranks", "clip", "momentum", "schedule", "checkpointing", "router"}


def train(job: Job) -> None:
    """Train with the arguments of the page, but in the order of the dataset and without a log."""
    case = job.case
    if case.is_custom or case.task == "tokens":
        raise UnsupportedError("it trains language models and sequence classifiers of transformers")
    is_text = case.task == "causal_lm"
    kind, settings = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if is_text else (Trainer, TrainingArguments)
    off: dict[str, Any] = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = settings(
        str(job.folder),
        per_device_train_batch_size=case.micro_batch_size,
        gradient_accumulation_steps=case.accumulation,
        num_train_epochs=case.epochs,
        max_grad_norm=job.clip_norm or 0.0,
        gradient_checkpointing=job.needs("checkpointing"),
        remove_unused_columns=False,
        train_dataloader_shuffle=False,
        dataloader_num_workers=0,
        dataloader_persistent_workers=False,
        check_model=False,
        use_cpu=True,
        bf16=False,
        **off,
    )
    template = Template(None, TemplateMeta("none", [], ["{{QUERY}}"], None))
    template.processor = None
    template.task_type = "causal_lm" if is_text else "seq_cls"
    template.set_mode("train")
    template.data_collator = lambda rows, padding_to=None: job.collate(rows)
    for part in job.module.modules():  # one with adapters has the model inside
        if hasattr(part, "config"):
            part.model_meta = SimpleNamespace(is_multimodal=False, model_arch=None)  # type: ignore[assignment]
            part.model_info = SimpleNamespace(is_moe_model=case.model == "mixtral")  # type: ignore[assignment]
    if not is_text:  # its loader gives every model one
        job.module.generation_config = None  # type: ignore[assignment]
    optimizer = job.optimizer()
    schedule = job.linear(optimizer) if job.needs("schedule") else constant(optimizer)
    trainer = kind(
        model=job.module,
        args=arguments,
        template=template,
        train_dataset=job.prompted(),
        optimizers=(optimizer, schedule),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
