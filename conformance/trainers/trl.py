"""TRL's SFTTrainer on tokens and labels that are there already."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

from conformance.cases import END, VOCABULARY
from conformance.job import Job, UnsupportedError
from conformance.trainers import transformers

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


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0, w1, ..., one for each token."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token=f"w{END}")


def words(tokens: Any) -> str:
    """Return the text of tokens."""
    return "".join(f" w{token}" for token in tokens.tolist())
