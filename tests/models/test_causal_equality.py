"""A language model however it is trained: losses and weights of a plain loop over the whole logits of whole batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from helpers.combinations import covering
from helpers.language import language_model, language_samples, plant_leaking_attention, precise
from helpers.matrix import (
    OPTIM,
    Case,
    difference,
    exact_memory,
    name_of,
    perturbed,
    plain_optimizer,
    stacked_run,
    steps_of,
)
from helpers.problems import collate
from helpers.rounding import ROUNDING
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from trainer.contract import Model
from trainer.engine.order import batch_indices
from trainer.models import CausalLM, chunked_loss, packed_attention

AXES: dict[str, tuple[Any, ...]] = {
    "family": ("gpt2", "llama", "qwen3", "gemma", "gemma3"),
    "cut": ((1, None), (3, None), (8, None), (8, 48)),  # most samples of a micro-batch, and most tokens
    "place": (("auto", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 3), ("fsdp", 3)),
    "checkpointing": ("none", "full"),
    "offload": ("none", "optimizer", "parameters"),
    "chunk": (None, 0, 1, 7),
    "free": (None, False),  # of padding
    "optim": ("sgd", "adamw"),
}
EVERY = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
ALL = [one for one in EVERY if one["offload"] != "parameters" or one["place"][0] == "fsdp"]
COVERING = covering(ALL, 2, AXES)
"""Every pair of settings of two axes."""
LIMIT = ROUNDING


@dataclass(frozen=True)
class Spoken(Case):
    """A language model on 17 ragged samples, of which one has no label and one is a single token.

    The batches have 8, 8 and 1 samples: on several ranks the last leaves some with an empty micro-batch.

    Args:
        chunk: ``model.loss_chunk``.
        free: ``model.padding_free``.
    """

    size: int = 17
    chunk: int | None = 0
    free: bool | None = None

    @property
    def model(self) -> Model:
        return language_model(self.name, loss_chunk=self.chunk, padding_free=self.free)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        samples = language_samples(self.size)
        samples[5] = {key: value[:1] for key, value in samples[5].items()}
        return samples


def case_of(
    family: str,
    cut: Any = (3, None),
    place: Any = ("auto", 1),
    checkpointing: str = "none",
    offload: str = "none",
    chunk: int | None = None,
    free: bool | None = None,
    optim: str = "sgd",
) -> Spoken:
    memory = exact_memory(cut, place, checkpointing, offload)
    return Spoken(family, memory, place[1], chunk=chunk, free=free, optim=OPTIM[optim])


@lru_cache
def plain_loop(family: str, optim: str) -> dict[str, Any]:
    """Plain transformers and torch: whole batches, padded, whole logits, their mean cross entropy."""
    case = case_of(family, optim=optim)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    ours = perturbed(case.model.build())
    module = precise(AutoModelForCausalLM.from_config(ours.config, attn_implementation="sdpa")).train()
    torch.set_default_dtype(torch.float32)
    module.load_state_dict(ours.state_dict())
    optimizer = plain_optimizer(module, case)
    samples, losses = case.samples, []
    for epoch, step in steps_of(case):
        batch = collate([samples[index] for index in batch_indices(0, epoch, step, case.size, case.batch_size)])
        logits = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        following = batch["labels"][:, 1:]
        total = cross_entropy(logits[:, :-1].flatten(0, 1), following.flatten(), reduction="sum")
        loss = total / (following != -100).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), case.optim.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"state": module.state_dict(), "losses": losses}


def error(case: Spoken, ranks: Any = None) -> float:
    """The largest relative difference from the plain loop, of losses and of weights."""
    ours = stacked_run(case) if case.world_size == 1 else ranks(case.world_size).run(stacked_run, case)[0]
    return max(difference(ours, plain_loop(case.name, case.optim.name)).values())


@pytest.mark.slow
@pytest.mark.parametrize("values", COVERING, ids=name_of)
def test_the_steps_are_those_of_a_plain_loop_over_whole_logits(values, ranks):
    assert error(case_of(**values), ranks) <= LIMIT


USUAL = (
    {
        "family": "gpt2",
        "place": ("ddp", 2),
        "cut": (8, 48),
        "checkpointing": "full",
        "offload": "optimizer",
        "chunk": 7,
    },
    {"family": "gemma", "place": ("ddp", 2), "cut": (1, None), "offload": "optimizer"},
    {"family": "qwen3", "place": ("fsdp", 2), "cut": (8, 48), "checkpointing": "full", "optim": "adamw"},
    {"family": "llama", "place": ("fsdp", 3), "cut": (3, None), "chunk": 1},
    {"family": "gemma3", "place": ("fsdp", 2), "checkpointing": "full", "offload": "parameters", "chunk": 5},
    {"family": "gpt2", "place": ("fsdp", 1), "cut": (3, None), "chunk": 7, "offload": "parameters"},
)


@pytest.mark.slow
@pytest.mark.parametrize("values", USUAL, ids=name_of)
def test_usual_steps_are_those_of_a_plain_loop_over_whole_logits(values, ranks):
    assert error(case_of(**values), ranks) <= LIMIT


# ----------------------------------------------------------------------------------------------------------------------
# Checks of the checks: a planted fault must be found.


def plant_unshifted_weight(monkeypatch):
    """Divides by all labels, also by the first of a text, which nothing predicts."""
    monkeypatch.setattr(CausalLM, "weigh", lambda self, batch: {"loss": float((batch["labels"] != -100).sum())})


def plant_mean_of_chunks(monkeypatch):
    """Every chunk of tokens counts alike, the last one with fewer, too."""
    whole = chunked_loss.chunked_loss

    def averaged(hidden, head, targets, transform, chunk):
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
        means = [whole(rows, head, own, transform, chunk) / max(1, len(own)) for rows, own in parts]
        return torch.stack(means).mean() * len(targets)

    monkeypatch.setattr(chunked_loss, "chunked_loss", averaged)


def plant_running_positions(monkeypatch):
    """Positions that go on from document to document. Rotary ones are relative: there it is none."""
    pack = packed_attention.pack_documents

    def running(batch):
        packed = pack(batch)
        return packed | {"position_ids": torch.arange(packed["input_ids"].shape[1])[None]}

    monkeypatch.setattr(packed_attention, "pack_documents", running)


@pytest.mark.parametrize(
    ("plant", "family"),
    [
        (plant_leaking_attention, "qwen3"),
        (plant_leaking_attention, "gpt2"),
        (plant_running_positions, "gpt2"),
        (plant_unshifted_weight, "llama"),
        (plant_mean_of_chunks, "gemma3"),
    ],
)
def test_a_planted_fault_is_found(plant, family, monkeypatch):
    """By the comparison: what the engine looks at in the first step, which finds two of them, is off."""
    monkeypatch.setattr("trainer.engine.step.LossCheck", lambda model: None)
    case = case_of(family, (8, 48), chunk=7)
    assert error(case) <= LIMIT
    plant(monkeypatch)
    assert error(case) > 1e-3
