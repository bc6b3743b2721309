"""LLaMA-Factory, stage sft: its trainer as ``train/sft/workflow.py`` makes it, on a model that is there already.

The first token is a part of the prompt, so it has no label.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

sys.modules["torchaudio"] = ModuleType("torchaudio")  # imported for audio, which is not used here
sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)

# ruff: noqa: E402
from llamafactory.hparams import FinetuningArguments
from llamafactory.hparams.training_args import TrainingArguments
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, PrinterCallback

from conformance.job import Job, UnsupportedError
from conformance.trainers.transformers import constant

TITLE, VERSION_OF = "LLaMA-Factory sft", "llamafactory"
DOCS = "https://llamafactory.readthedocs.io/en/latest/getting_started/sft.html"
FEATURES = {"ranks", "clip", "momentum", "schedule", "router"}


def train(job: Job) -> None:
    """Train with the arguments of the page."""
    if job.case.task != "causal_lm":
        raise UnsupportedError("stage sft trains causal language models")
    off = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(
        str(job.folder),
        per_device_train_batch_size=job.case.micro_batch_size,
        gradient_accumulation_steps=job.case.accumulation,
        num_train_epochs=job.case.epochs,
        max_grad_norm=job.clip_norm or 0.0,
        remove_unused_columns=False,
        **off,
    )
    words = Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    optimizer = job.optimizer()
    trainer = CustomSeq2SeqTrainer(
        model=job.module,
        args=arguments,
        finetuning_args=FinetuningArguments(stage="sft", finetuning_type="full", disable_shuffling=True),
        processor=None,
        model_args=None,
        data_collator=job.collate,
        train_dataset=job.prompted(),
        gen_kwargs={},
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[PAD]"),
        optimizers=(optimizer, job.linear(optimizer) if job.needs("schedule") else constant(optimizer)),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
