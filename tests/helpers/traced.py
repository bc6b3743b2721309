"""Whole traces of runs, made in processes of their own, and what tests ask of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from helpers.combinations import Block
from helpers.tiny import InMemory, trace_of
from trainer.contract import Model
from trainer.fakegpu.events import Event, Operation, Trace
from trainer.models.base import classification_loss
from trainer.planner.predict import prepare_recipe
from trainer.recipe import Memory, Optim, Recipe
from trainer.system.child_jobs import run_in_children
from trainer.values import Loss

BATCH, TOKENS, WIDTH, INNER, CLASSES, BLOCKS = 64, 32, 128, 512, 8, 4
FLOAT, LONG, BFLOAT16 = 4, 8, 2


class Mixed(nn.Module):
    """Blocks, and a head on the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, INNER, 0.1) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@dataclass
class Own(Model):
    """A model that the trainer has never seen."""

    asks: bool = False  # for the sign of what it computes, which nobody knows without computing it
    fails: bool = False  # as it computes its loss
    blocks = (Block,)

    def build(self) -> nn.Module:
        return Mixed()

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        if self.fails:
            raise KeyError("no such column")
        logits = module(batch["pixel_values"])
        yield classification_loss(-logits if self.asks and logits.sum() > 0 else logits, batch["labels"])


WEIGHTS = sum(parameter.numel() for parameter in Mixed().parameters())
MATRIX = WIDTH * INNER  # elements of each of a block's two matrices


def own_recipe(memory: Memory | None = None, model: Model | None = None, **settings: Any) -> Recipe:
    """A prepared recipe that trains ``Own`` with AdamW, as one micro-batch unless told otherwise."""
    samples = [{"pixel_values": torch.zeros(TOKENS, WIDTH), "labels": torch.tensor(0)} for _ in range(2 * BATCH)]
    parts: dict[str, Any] = {"model": model or Own(), "data": InMemory(samples=samples), "memory": memory or Memory()}
    return prepare_recipe(Recipe(**parts | {"optim": Optim("adamw"), "batch_size": BATCH, "epochs": 2} | settings))


def traces(jobs: Mapping[str, Callable[[], Trace]]) -> dict[str, Trace]:
    """What each job returns, done in a process of its own."""
    names, found = list(jobs), {}
    for number, result in run_in_children([partial(_in_plain_types, job) for job in jobs.values()], 2):
        if isinstance(result, Exception):
            raise result
        found[names[number]] = _from_plain_types(result)
    return found


def traced(recipes: Mapping[str, tuple[Recipe, int]]) -> dict[str, Trace]:
    """The trace of each recipe, on so many ranks."""
    return traces({name: partial(trace_of, recipe, ranks) for name, (recipe, ranks) in recipes.items()})


def _in_plain_types(job: Callable[[], Trace]) -> dict[str, Any]:
    return dataclasses.asdict(job())


def _from_plain_types(found: dict[str, Any]) -> Trace:
    found["events"] = [Event(*event) for event in found["events"]]
    found["work"] = [Operation(*work) for work in found["work"]]
    found["categories"] = {int(key): category for key, category in found["categories"].items()}
    return Trace(**found)


def held(trace: Trace, category: str) -> list[int]:
    """Bytes of a category after each event."""
    alive: dict[int, int] = {}
    now, course = 0, []
    for event in trace.events:
        if event.bytes:
            alive[event.id] = event.bytes if trace.categories.get(event.id, "temporaries") == category else 0
            now += alive[event.id]
        else:
            now -= alive.pop(event.id)
        course.append(now)
    return course


def when(trace: Trace, phase: str, category: str) -> list[int]:
    """Bytes of a category each time that a phase begins."""
    course = [0, *held(trace, category)]
    return [course[index] for index, name in trace.marks if name == phase]


def made(trace: Trace, phase: str, op: str) -> list[int]:
    """Sizes of what an operation allocates in a phase, over the whole run."""
    return [event.bytes for event in trace.events if event.bytes and (event.phase, event.op) == (phase, op)]


def count(trace: Trace, phase: str) -> int:
    """How often a phase begins."""
    return sum(name == phase for _, name in trace.marks)
