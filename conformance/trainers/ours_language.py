"""This project's ``fit`` with its own language model, which leaves out padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from conformance.job import Job, UnsupportedError
from conformance.trainers import ours
from trainer.models import CausalLM

TITLE, VERSION_OF = "trainer, CausalLM without padding", "exactbatch-trainer"
DOCS = "../packing.md"
VERSION = ours.VERSION
FEATURES = ours.FEATURES | {"packing"}
SHUFFLES = True


@dataclass
class CaseLanguageModel(CausalLM):
    """``CausalLM`` around the module of a case."""

    job: ClassVar[Job]

    def skeleton(self) -> nn.Module:
        return self._finalize_module(self.job.module)


def train(job: Job) -> None:
    """Train with a recipe."""
    if job.case.model not in ("llama", "tied llama", "frozen llama", "gpt2"):
        raise UnsupportedError("the model of this case is not one that CausalLM builds")
    config = job.module.config.to_diff_dict()  # type: ignore[union-attr,operator]
    CaseLanguageModel.job = job
    ours.train(job, CaseLanguageModel(config.pop("model_type"), None, "none", config, padding_free=True))
