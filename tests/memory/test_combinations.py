"""Any combination of knobs either trains three steps or is refused in one line: none crashes, none hangs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import pytest
import torch
from helpers.combinations import (
    KNOBS,
    ask,
    case_of,
    covering,
    likely,
    meetings,
    name_of,
    plain_losses,
    spread,
    tower_file,
    train,
)
from helpers.matrix import ADAMW, Case, difference, stacked_run
from helpers.problems import TwoLosses
from helpers.rounding import ROUNDING
from torch import Tensor, nn

from trainer.contract import Model
from trainer.errors import RecipeError
from trainer.memory.plan import Plan
from trainer.models import MLP
from trainer.recipe import Memory, Optim

ASKED = 2_000

EXACT = {"32-true": 1e-6, "64-true": ROUNDING}
"""Relative error of the losses that is allowed where nothing is lossy."""

PACKAGES = {
    "torchao": lambda values: values["optimizer_state_bits"] < 32 or values["stochastic_rounding"],
    "timm": lambda values: values["optim"] == "lion",
}

SEEN_BY_THE_COMPILER = ("compile", "activation_checkpointing", "activation_offload")

SECONDS = {False: 60, True: 200}
"""After which a combination, without and with compiling, is held to hang."""


SGD = Optim("sgd", lr=0.1, momentum=0.9, clip_norm=0.5)


@dataclass(frozen=True)
class TwoParts(Case):
    """Two losses, each of which reaches one of two heads; a third part is reached by neither."""

    blocks: tuple = (nn.Linear,)

    @property
    def model(self) -> Model:
        model = TwoLosses()
        model.blocks = self.blocks
        return model


@cache
def alone(kind: type[Case], name: str, optim: Optim = ADAMW, **knobs: object) -> dict:
    """The steps of one rank without techniques."""
    return stacked_run(kind(name, Memory(**knobs), optim=optim))


def accepted(count: int, compiled: bool) -> list[dict]:
    """Of ``count`` random combinations those that have a plan; every second one has frozen layers."""
    asked = [values for values in likely(count) if (values["compile"] != "none") == compiled]
    plans = [values for values in asked if isinstance(ask(values), Plan)]
    return [{**values, "frozen": bool(at % 2)} for at, values in enumerate(plans)]


ON_ONE_RANK = [values for values in accepted(1_500, True) if values["place"][1] == 1]


def check_trains(values: dict, ranks: object) -> None:
    """Three steps on all ranks, within some time, with the losses of a plain loop where nothing is lossy."""
    for package, needs_it in PACKAGES.items():
        if needs_it(values):
            pytest.importorskip(package)
    values = dict(values)
    frozen = values.pop("frozen")
    case = case_of(values, frozen, tower_file())
    memory = case.memory
    by_rank = ranks(case.world_size).run(train, case, seconds=SECONDS[memory.compile != "none"])
    assert all(losses == by_rank[0] for losses in by_rank)
    assert all(map(math.isfinite, by_rank[0]))
    if memory.precision in EXACT and memory.optimizer_state_bits == 32:
        plain = plain_losses(case)
        assert by_rank[0] == pytest.approx(plain, rel=EXACT[memory.precision])


def check_answer(values: dict) -> bool:
    """Either a plan, or one line that names one of the keys that were changed; whether it is a plan."""
    answer = ask(values)
    if isinstance(answer, Plan):
        return True
    changed = {key for key, value in values.items() if value != KNOBS[key][0]} - {"place"} | {"strategy"}
    keys = {"optim": "optim.name", "clip_norm": "optim.clip_norm", "accumulate": "accumulate"}
    assert "\n" not in answer, answer
    assert any(re.search(rf"\b{keys.get(key, f'memory.{key}')}\b", answer) for key in changed), (values, answer)
    return False


def test_a_combination_has_a_plan_or_a_reason():
    """A part of them, evenly spread; ``-m slow`` asks about more, and about all values of any three knobs."""
    plans = sum(check_answer(values) for values in spread(ASKED))
    assert 0 < plans < ASKED


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_combinations_have_a_plan_or_a_reason():
    asked = list(spread(10 * ASKED))
    assert 0 < sum(map(check_answer, asked)) < len(asked)
    met = set().union(*(meetings(values, 3) for values in asked[: 4 * ASKED]))
    levels = [len(values) for values in KNOBS.values()]
    assert len(met) == sum(math.prod(three) for three in combinations(levels, 3))


ACCEPTED = accepted(1_500, False)


@pytest.mark.first(2)
@pytest.mark.parametrize("values", covering(ACCEPTED, 1), ids=name_of)
def test_it_trains_three_steps(values, ranks):
    """Any value that any plan has; ``-m slow`` has any two of all knobs."""
    check_trains(values, ranks)


@pytest.mark.slow  # compilers take a minute of it; test_compiled.py has each mode
@pytest.mark.parametrize("values", covering(ON_ONE_RANK, 1, SEEN_BY_THE_COMPILER), ids=name_of)
def test_it_trains_three_steps_compiled(values, ranks):
    """Any value that any plan on one rank has, of the knobs that change what is compiled."""
    check_trains(values, ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_values_of_two_knobs_train_together(ranks):
    check_all(covering(accepted(10_000, False), 2), ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_values_of_two_knobs_train_together_compiled_on_two_ranks(ranks):
    compiled = [values for values in accepted(10_000, True) if values["place"][1] == 2]
    check_all(covering(compiled, 2, SEEN_BY_THE_COMPILER), ranks)


def check_all(cases: list[dict], ranks: object) -> None:
    found = {name_of(values): failure(values, ranks) for values in cases}
    print(f"{len(cases)} combinations trained")
    assert not any(found.values()), {name: error for name, error in found.items() if error}


def failure(values: dict, ranks: object) -> str:
    try:
        check_trains(values, ranks)
    except (AssertionError, TimeoutError) as error:
        return str(error)[-2000:]
    return ""


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("world_size", "strategy", "offload", "accumulate"),
    [
        (1, "auto", "optimizer", 2),
        (1, "fsdp", "parameters", 2),
        (2, "auto", "none", 1),
        (2, "auto", "optimizer", 2),
        (2, "fsdp", "none", 2),
        (2, "fsdp", "optimizer", 1),
        (2, "fsdp", "parameters", 2),
    ],
)
def test_several_losses_that_reach_different_parts(world_size, strategy, offload, accumulate, ranks):
    memory = Memory(strategy=strategy, cpu_offload=offload, micro_batch_size=8 // world_size // accumulate)
    ours = ranks(world_size).run(stacked_run, TwoParts("two", memory, world_size, optim=SGD))[0]
    assert max(difference(ours, alone(TwoParts, "two", optim=SGD)).values()) <= 1e-6


class Block(nn.Module):
    """A layer, and one that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(192, 192), nn.Linear(192, 192)

    def forward(self, features: Tensor) -> Tensor:
        return self.used(features).tanh()


class PartlyUsed(MLP):
    """Two such blocks and a head."""

    blocks = (Block,)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), Block(), Block(), nn.Linear(192, 5))


class PartlyUsedCase(Case):
    @property
    def model(self) -> Model:
        return PartlyUsed([16], num_classes=5, image_size=8, channels=3)


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("ddp", "none"), ("ddp", "optimizer"), ("fsdp", "none"), ("fsdp", "optimizer"), ("fsdp", "parameters")],
)
def test_a_parameter_that_no_loss_reaches_is_neither_updated_nor_decayed(strategy, offload, ranks):
    plain = {"micro_batch_size": 3, "precision": "64-true"}
    case = PartlyUsedCase("vit", Memory(strategy=strategy, cpu_offload=offload, **plain), 2)
    ours, expected = ranks(2).run(stacked_run, case)[0], alone(PartlyUsedCase, "vit", **plain)
    torch.testing.assert_close(ours["state"], expected["state"], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(("key", "value"), [("activation_checkpointing", "full"), ("compile", "blocks")])
def test_a_technique_that_needs_blocks_says_that_there_are_none(key, value):
    with pytest.raises(RecipeError, match=rf"^memory\.{key}={value} works on repeated modules.*$"):
        stacked_run(TwoParts("two", Memory(**{key: value}), blocks=()))
