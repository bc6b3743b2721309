"""Any combination of knobs either trains three steps or is refused in one line: none crashes, none hangs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import combinations

import pytest
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
from helpers.matrix import Case, difference, stacked_run
from helpers.problems import TwoLosses
from torch import nn

from trainer.contract import Model
from trainer.errors import RecipeError
from trainer.memory.plan import Plan
from trainer.recipe import Memory, Optim

ASKED = 10_000

EXACT = {"32-true": 1e-6, "64-true": 1e-12}
"""Relative error of the losses that is allowed where nothing is lossy."""

PACKAGES = {
    "torchao": lambda values: values["optimizer_state_bits"] < 32 or values["stochastic_rounding"],
    "timm": lambda values: values["optim"] == "lion",
}

DECISIVE = ("place", "activation_checkpointing", "cpu_offload", "optimizer_in_backward", "init", "accumulate")
"""Where weights, gradients and activations are."""

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


def accepted(count: int, compiled: bool) -> list[dict]:
    """Of ``count`` random combinations those that have a plan; every second one has frozen layers."""
    asked = [values for values in likely(count) if (values["compile"] != "none") == compiled]
    plans = [values for values in asked if isinstance(ask(values), Plan)]
    return [{**values, "frozen": bool(at % 2)} for at, values in enumerate(plans)]


ON_ONE_RANK = [values for values in accepted(4_000, True) if values["place"][1] == 1]


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
    """A part of them, evenly spread; ``-m slow`` asks about more."""
    plans = sum(check_answer(values) for values in spread(ASKED))
    assert 0 < plans < ASKED


@pytest.mark.slow
def test_all_values_of_any_three_knobs_are_asked_about():
    met = set().union(*(meetings(values, 3) for values in spread(ASKED)))
    levels = [len(values) for values in KNOBS.values()]
    assert len(met) == sum(math.prod(three) for three in combinations(levels, 3))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_combinations_have_a_plan_or_a_reason():
    plans = sum(check_answer(values) for values in spread(20 * ASKED))
    assert 0 < plans < 20 * ASKED


ACCEPTED = accepted(4_000, False)


@pytest.mark.parametrize("values", covering(ACCEPTED, 2, DECISIVE) + covering(ACCEPTED, 1), ids=name_of)
def test_it_trains_three_steps(values, ranks):
    """Any value that any plan has, and any two of the knobs that decide most; ``-m slow`` has any two of all."""
    check_trains(values, ranks)


@pytest.mark.parametrize("values", covering(ON_ONE_RANK, 1, SEEN_BY_THE_COMPILER), ids=name_of)
def test_it_trains_three_steps_compiled(values, ranks):
    """Any value that any plan on one rank has, of the knobs that change what is compiled; ``-m slow`` has all pairs."""
    check_trains(values, ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_values_of_two_knobs_train_together(ranks):
    check_all(covering(accepted(20_000, False), 2), ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_values_of_three_knobs_that_decide_most_train_together(ranks):
    check_all(covering(accepted(20_000, False), 3, DECISIVE), ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_values_of_two_knobs_train_together_compiled(ranks):
    check_all(covering(accepted(20_000, True), 2, (*SEEN_BY_THE_COMPILER, "place", "precision")), ranks)


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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_several_losses_that_reach_different_parts(strategy, world_size, offload, accumulate, ranks):
    memory = Memory(strategy=strategy, cpu_offload=offload, micro_batch_size=8 // world_size // accumulate)
    ours = ranks(world_size).run(stacked_run, TwoParts("two", memory, world_size, optim=SGD))[0]
    alone = stacked_run(TwoParts("two", Memory(), optim=SGD))
    assert max(difference(ours, alone).values()) <= 1e-6


@pytest.mark.parametrize("knobs", [{"strategy": "fsdp"}, {"activation_checkpointing": "full"}, {"compile": "blocks"}])
def test_a_technique_that_needs_blocks_says_that_there_are_none(knobs, ranks):
    (answer,) = ranks(1).run(refusal, TwoParts("two", Memory(**knobs), blocks=()))
    ((key, value),) = knobs.items()
    assert answer.startswith(f"memory.{key}={value} works on repeated modules")
    assert "\n" not in answer


def refusal(case: TwoParts) -> str | None:
    try:
        stacked_run(case)
    except RecipeError as error:
        return str(error)
    return None
