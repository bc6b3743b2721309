"""TRL's SFTTrainer on tokens and labels that are there already."""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from conformance.job import Job, UnsupportedError
from conformance.trainers import transformers

TITLE, VERSION_OF = "TRL SFTTrainer", "trl"
DOCS = "https://huggingface.co/docs/trl/sft_trainer"
FEATURES = transformers.FEATURES


def train(job: Job, kind: type = SFTTrainer, even_batches: bool = True) -> None:
    """Train with the arguments of the page."""
    if job.case.task != "causal_lm":
        raise UnsupportedError("it trains causal language models")
    words = Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]"))  # only its padding token is used
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[PAD]")
    rows = [{key: value.tolist() for key, value in sample.items()} for sample in job.dataset]
    optimizer = job.optimizer()
    own = {
        "padding_free": job.needs("packing"),
        "max_length": None,
        "accelerator_config": {"even_batches": even_batches},
    }
    kind(
        model=job.module,
        args=transformers.arguments(job, SFTConfig, **own),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, job.linear(optimizer) if job.needs("schedule") else transformers.constant(optimizer)),
    ).train()
