"""All combinations of the knobs that decide techniques, and three steps of a small model with any of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers import matrix
from helpers.matrix import Case
from trainer.contract import Model, Streamable
from trainer.errors import RecipeError
from trainer.memory import knobs as table
from trainer.memory.optimizer import OPTIMIZERS
from trainer.memory.plan import Plan, decide_plan
from trainer.models.base import classification_loss
from trainer.recipe import Memory, Optim
from trainer.values import Loss, PretrainedWeights
from trainer.weights.streaming import tensors_in

CLASSES, WIDTH, INNER, PIXELS = 5, 64, 128, 16


def values_of(name: str) -> list[Any]:
    """All that a field of ``Memory`` can be, its default first, and half of the blocks."""
    values = [value for knob in table.KNOBS if knob.name == name for value in knob.values]
    return [*values, 0.5] if name == "activation_checkpointing" else values


OTHERS = ("precision", "strategy", "micro_batch_size", "micro_batch_tokens", "sequence_parallel")
KNOBS: dict[str, list[Any]] = {
    "place": [(s, n) for s in ("auto", "single", "ddp", "fsdp") for n in (1, 2)],  # strategy and ranks
    **{name: values_of(name) for name in vars(Memory()) if name not in OTHERS and values_of(name)},
    "precision": values_of("precision"),
    "optim": ["adamw", "adam", "sgd", "adafactor", "adagrad", "rmsprop", "lion"],
    "clip_norm": [None, 0.5],
    "accumulate": [1, 3],
}
COUNT = math.prod(map(len, KNOBS.values()))

Combination = dict[str, Any]


def combination_at(number: int) -> Combination:
    """One of the ``COUNT`` combinations."""
    values = {}
    for key, levels in KNOBS.items():
        number, at = divmod(number, len(levels))
        values[key] = levels[at]
    return values


def spread(count: int) -> Iterator[Combination]:
    """``count`` different combinations, evenly spread over all."""
    return map(combination_at, random.Random(0).sample(range(COUNT), count))


def likely(count: int) -> Iterator[Combination]:
    """Random ones, in which each knob is as likely at its first value as not: few contradict themselves.

    Nothing is drawn for a knob of one value: a new one of these changes no combination.
    """
    generator = random.Random(0)

    def drawn(key: str, levels: Sequence[Any]) -> Any:
        if len(levels) == 1:
            return levels[0]
        return generator.choice(levels if key == "place" or generator.random() < 0.5 else levels[:1])

    for _ in range(count):
        yield {key: drawn(key, levels) for key, levels in KNOBS.items()}


@dataclass(frozen=True)
class Trained(Case):
    """A combination, with everything that it takes to train; picklable."""

    size: int = 29
    batch_size: int = 12  # the last batch of an epoch has 5 samples
    accumulate: int | None = 1
    frozen: bool = False  # the first layers do not train
    weights: str = "initial.safetensors"  # the file

    @property
    def model(self) -> Model:
        return Tower(self.weights, self.frozen)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randn(self.size, PIXELS, generator=generator)
        labels = torch.randint(CLASSES, (self.size,), generator=generator).tolist()
        return [{"pixel_values": one, "labels": label} for one, label in zip(pixels, labels, strict=True)]

    def prepared(self, module: nn.Module) -> nn.Module:
        return module


def case_of(values: Combination, frozen: bool = False, weights: str = "initial.safetensors") -> Trained:
    """Everything that it takes to train ``values``."""
    others = {key: value for key, value in values.items() if key not in ("place", "optim", "clip_norm", "accumulate")}
    strategy, world_size = values["place"]
    optim = Optim(values["optim"], lr=1e-3, weight_decay=0.1, clip_norm=values["clip_norm"])
    memory = Memory(strategy=strategy, **others)
    return Trained(
        "tower", memory, world_size, optim=optim, accumulate=values["accumulate"], frozen=frozen, weights=weights
    )


def ask(values: Combination) -> Plan | str:
    """The plan, or why there is none."""
    case = case_of(values)
    try:
        return decide_plan(case.recipe, case.world_size)
    except RecipeError as error:
        return str(error)


def covering(
    candidates: Iterable[Combination], strength: int, knobs: Collection[str] = (*KNOBS, "frozen")
) -> list[Combination]:
    """Some of ``candidates`` in which all values of any ``strength`` of ``knobs`` meet that meet in any candidate."""
    left = [(each, meetings({key: each[key] for key in knobs if key in each}, strength)) for each in candidates]
    chosen: list[Combination] = []
    seen: set[Any] = set()
    least = max((len(meet) for _, meet in left), default=0)
    while left:  # those with the most that is new first
        rest = []
        for values, meet in left:
            new = len(meet - seen)
            if new >= least:
                chosen.append(values)
                seen |= meet
            elif new:
                rest.append((values, meet))
        left, least = rest, least // 2 or 1
    return chosen


def meetings(values: Combination, strength: int) -> set[Any]:
    """The values of each ``strength`` knobs of a combination."""
    return set(combinations([(key, str(value)) for key, value in values.items()], strength))


def name_of(values: Combination) -> str:
    """What of a combination is not the first value of its knob, in one line."""
    named = {key: value for key, value in values.items() if value != KNOBS.get(key, [False])[0]}
    return ",".join(f"{key}={value}" for key, value in named.items()).replace(" ", "") or "defaults"


class Block(nn.Module):
    """By default large enough, even as half of it, for its matrices to have a state of few bits."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class TowerModule(nn.Module):
    """A linear stem, two blocks, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, spoil: bool = False) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if spoil:  # adds 0, whose gradient is not finite for the last row of the head: one rank's shard, under FSDP
            logits = logits + (0 * nn.functional.linear(x.detach(), self.head.weight)[:, -1].sum()).sqrt()
        return logits


@dataclass
class Tower(Streamable):
    """A small residual network that can start on meta."""

    weights: str
    frozen: bool = False

    def skeleton(self) -> nn.Module:
        module = TowerModule()
        for part in (module.stem, module.blocks[0]):
            part.requires_grad_(not self.frozen)
        return module

    def pretrained(self) -> PretrainedWeights:
        return PretrainedWeights({name: stored for name, (stored, _) in tensors_in(self.weights).items()})

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        yield classification_loss(module(batch["pixel_values"], "spoil" in batch), batch["labels"])


@lru_cache(maxsize=1)
def tower_file() -> str:
    """The initial weights of a ``Tower``."""
    torch.manual_seed(0)
    file = Path(mkdtemp(prefix="tower-")) / "initial.safetensors"
    save_file(TowerModule().state_dict(), file)
    return str(file)


def train(case: Trained) -> list[float]:
    """The losses of three steps; called on every rank."""
    if case.memory.compile != "none":
        torch._dynamo.reset()  # what other combinations compiled counts against its limit of versions
    return matrix.stacked_run(case)["losses"]


def plain_losses(case: Trained, steps: tuple[int, ...] = (0, 1, 2), decay: float = 1.0) -> list[float]:
    """The same by a plain loop: whole batches, no technique; the learning rate decays after each step."""
    precision = case.memory.precision if case.memory.precision in matrix.TYPES else "32-true"
    return _plain_losses(replace(case, memory=Memory(precision=precision), world_size=1, accumulate=1), steps, decay)


@lru_cache
def _plain_losses(case: Trained, steps: tuple[int, ...], decay: float) -> list[float]:
    return matrix.plain_run(case, steps, decay, _class(case.optim.name))["losses"]


def _class(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name == "lion":
        from timm.optim.lion import Lion

        return Lion
    return OPTIMIZERS[name]
