"""The table of knobs holds every knob, and what it says of them is so."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from trainer import Memory, Optim, Recipe
from trainer.contract import Data
from trainer.errors import RecipeError
from trainer.memory.knobs import KNOBS, LOSSLESS_PLANNED, Knob, describe_knobs
from trainer.memory.plan import Plan, decide_plan
from trainer.models import MLP
from trainer.planner.report import OWN

NO_TECHNIQUE = {"budget", "correct_batchnorm"}
SAID_ANYWAY = {"micro_batch_size", "micro_batch_tokens", "precision", "strategy"}
"""What every plan tells, turned or not."""
SHARED = {"strategy", "replicas", "reshard_after_forward", "sync_every_micro_step", "cpu_offload", "activation_offload"}
"""Knobs that the planner's table shows two to a column."""


def literals(kind: Any) -> set[Any]:
    """What a field of this type can be, where that is a choice."""
    found = {value for part in get_args(kind) for value in (literals(part) or {part}) if not isinstance(value, type)}
    return found | ({True, False} if kind is bool or bool in get_args(kind) else set())


def test_every_field_of_memory_has_a_row_and_every_row_a_field():
    assert {knob.name for knob in KNOBS} == {field.name for field in dataclasses.fields(Memory)} - NO_TECHNIQUE


@pytest.mark.parametrize("name", sorted({knob.name for knob in KNOBS if knob.values} - {"replicas", "tensor_parallel"}))
def test_every_choice_of_a_field_is_in_its_row_and_the_default_is_the_first(name):
    values = [value for knob in KNOBS if knob.name == name for value in knob.values]
    choices = literals(get_type_hints(Memory)[name]) - {"auto", "single"}
    assert set(map(repr, values)) == set(map(repr, choices | {None} if None in values else choices))
    assert values[0] == getattr(Memory(), name) or name == "strategy"
    assert {turn.value for knob in KNOBS if knob.name == name for turn in knob.candidates} <= set(values)


def plan_with(knob: Knob, value: Any) -> Plan | None:
    recipe = Recipe(model=MLP([8]), data=Data(), optim=Optim("adamw"), batch_size=8, memory=Memory(micro_batch_size=8))
    ranks = 2 if knob.needs_ranks else 1
    try:
        return decide_plan(recipe.replace(memory=dataclasses.replace(recipe.memory, **{knob.name: value})), ranks)
    except RecipeError:
        return None


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_fp16_which_overflows_is_refused_where_no_step_can_be_skipped(precision):
    memory = Memory(micro_batch_size=8, precision=precision, optimizer_in_backward=True)
    with pytest.raises(RecipeError, match="cannot skip a step whose fp16 gradients overflow"):
        decide_plan(Recipe(model=MLP([8]), data=Data(), optim=Optim("sgd"), batch_size=8, memory=memory), 1)


def test_what_is_lossy_is_marked_so():
    plans = [(knob, plan) for knob in KNOBS for turn in knob.candidates if (plan := plan_with(knob, turn.value))]
    assert {knob.name for knob, _ in plans} == {knob.name for knob in KNOBS if knob.candidates}
    assert all(knob.lossy == bool(plan.lossy) for knob, plan in plans)


def test_a_plan_names_every_knob_that_is_turned():
    for knob in KNOBS:
        turned = [value for value in knob.values[1:] if value not in knob.noop_values]
        for value in turned if knob.name not in SAID_ANYWAY else ():
            assert len(describe_knobs(dataclasses.replace(Memory(), **{knob.name: value}))) == 1, (knob.name, value)
    assert describe_knobs(Memory(activation_checkpointing=0.25)) == ["25 % checkpointing"]
    assert describe_knobs(Memory(activation_checkpointing=0, sync_every_micro_step=False)) == []


def test_every_knob_that_is_searched_is_in_the_planners_table():
    assert {knob.name for knob in LOSSLESS_PLANNED} == {*OWN.values()} | SHARED
