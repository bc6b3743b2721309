"""This project's ``fit`` with its own language model, which leaves out padding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from conformance.cases import BETA
from conformance.job import Job, UnsupportedError
from conformance.trainers import ours
from conformance.words import tokenizer, words
from trainer.data import Preferences
from trainer.models import CausalLM

TITLE, VERSION_OF = "trainer, CausalLM without padding", "exactbatch-trainer"
DOCS = "../packing.md"
VERSION = ours.VERSION
FEATURES = ours.FEATURES | {"packing", "preference"}
SHUFFLES = True


@dataclass
class CaseLanguageModel(CausalLM):
    """``CausalLM`` around the module of a case."""

    job: ClassVar[Job]

    def skeleton(self) -> nn.Module:
        return self._finalize_module(self.job.module)


def train(job: Job) -> None:
    """Train with a recipe."""
    if job.case.model not in ("llama", "tied llama", "frozen llama", "gpt2", "preference"):
        raise UnsupportedError("the model of this case is not one that CausalLM builds")
    config = job.module.config.to_diff_dict()  # type: ignore[union-attr,operator]
    CaseLanguageModel.job = job
    name = config.pop("model_type")
    model = CaseLanguageModel(name, weights=None, tokenizer="none", config=config, padding_free=True)
    if job.case.task != "preference":
        ours.train(job, model)
        return
    model.tokenizer, model.loss, model.beta = str(job.folder / "tokenizer"), "dpo", BETA
    tokenizer().save_pretrained(model.tokenizer)
    ours.train(job, model, preferences(job))


def preferences(job: Job) -> Preferences:
    """Write the pairs of a case as texts, whose end is the tokenizer's, and return them as data."""
    path = job.folder / "pairs.jsonl"
    rows = [
        {"prompt": words(one["prompt"]), **{side: words(one[side][:-1]) for side in ("chosen", "rejected")}}
        for one in job.dataset
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return Preferences(str(path), chat_template="plain", cache_dir=str(job.folder / "cache"))
