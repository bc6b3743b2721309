"""Traces of any micro-batch from those of two: equal to real traces, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.language import FAMILIES
from helpers.tiny import InMemory, model_of, samples_of
from helpers.traced import traced

from trainer.fakegpu.events import BatchMark, Event, Trace
from trainer.fakegpu.template import Template
from trainer.planner.predict import prepare_recipe
from trainer.recipe import Memory, Optim, Recipe

TOKENS = 60
BATCH, SMALL, LARGE, BETWEEN = 24, 3, 12, (5, 8)  # 5 does not divide the batch
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("vit", 1, {"precision": "bf16-mixed"}),
    ("llama", 1, {"cpu_offload": "optimizer", "precision": "bf16-mixed"}),
    ("tower", 2, {"strategy": "fsdp", "precision": "bf16-mixed"}),
    ("distilbert", 1, {"activation_checkpointing": "full"}),
    ("gpt2", 1, {"activation_checkpointing": "selective", "activation_offload": True}),
    ("tower", 1, {"cpu_offload": "parameters", "activation_checkpointing": "full"}),
    ("batchnorm", 1, {"correct_batchnorm": True}),
    ("two_losses", 2, {"strategy": "ddp"}),
]


def recipe_of(name: str, memory: dict[str, Any], ranks: int) -> Recipe:
    """A recipe of a tiny model with samples of one length."""
    samples = [shortened(sample) for sample in 4 * samples_of(name)]
    return prepare_recipe(
        Recipe(
            # A loss in chunks of tokens takes more operations for more of them.
            model=replace(model_of(name), loss_chunk=0) if name in FAMILIES else model_of(name),
            data=InMemory(samples=samples),
            optim=Optim("adamw"),
            batch_size=ranks * BATCH,
            epochs=1,
            memory=Memory(**memory),
        )
    )


def shortened(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample with ``TOKENS`` tokens, half of which are to be predicted."""
    if "input_ids" not in sample:
        return sample
    ids = sample["input_ids"].repeat(TOKENS)[:TOKENS]
    predicted = torch.where(torch.arange(TOKENS) < TOKENS // 2, -100, ids)
    return {"input_ids": ids, "labels": predicted if sample["labels"].dim() else sample["labels"]}


def sizes_of(trace: Trace) -> list[int]:
    return [mark.samples for mark in trace.batches]


@pytest.mark.parametrize(
    ("name", "ranks", "memory"),
    [case if at < 3 else pytest.param(*case, marks=pytest.mark.slow) for at, case in enumerate(CASES)],
)
def test_what_a_template_says_is_what_a_trace_says(name, ranks, memory):
    recipes = {m: recipe_of(name, memory | {"micro_batch_size": m}, ranks) for m in (SMALL, LARGE, *BETWEEN)}
    found = traced({str(m): (recipe, ranks) for m, recipe in recipes.items()})
    template = Template.between(found[str(SMALL)], found[str(LARGE)])
    assert template is not None
    for m in BETWEEN:
        real = found[str(m)]
        assert template.at(sizes_of(real), real.skipped_micro_steps) == real


def made(samples: int, *sizes: int, kind: str = "") -> Trace:
    """A trace of one micro-batch that allocates ``sizes``."""
    events = [Event(number, size, "mm", "forward") for number, size in enumerate(sizes, start=1)]
    return Trace(events=events, batches=[BatchMark(0, 0, 0, samples, kind)])


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (made(2, 4 * 2 * 2), made(8, 4 * 8 * 8)),  # the similarity of each sample with each
        (made(2, 10), made(8, 15)),  # a part of a byte for a sample
        (made(2, 10), made(8, 40, 40)),  # another number of allocations
        (made(1, 10), made(8, 80)),  # one sample may be broadcast
        (made(2, 20, kind="16 tokens"), made(8, 80, kind="12 tokens")),
        (made(8, 20), made(8, 80)),
    ],
)
def test_there_is_no_template_of_traces_that_differ_in_more_than_lines(small, large):
    assert Template.between(small, large) is None


def test_a_template_says_nothing_outside_its_traces():
    template = Template.between(made(2, 10, 7), made(8, 28, 7))
    assert template is not None
    between = template.at([4])
    assert between is not None
    assert [event.bytes for event in between.events] == [16, 7]
    assert template.at([9]) is template.at([1]) is template.at([4, 4]) is None
    assert template.sizes_at(4) == [4]
