"""Any combination of knobs is predicted, or refused in one line that names a key: none crashes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from helpers.combinations import Combination, ask, covering, likely, name_of
from helpers.tiny import MODELS, prediction_of, recipe_of, target_of

from trainer.errors import RecipeError
from trainer.memory.plan import Plan, decide_plan
from trainer.planner.predict import predict_in_process
from trainer.recipe import Memory, Optim
from trainer.system.child_jobs import run_in_children

PACKAGES = ("torchao", "timm", "peft")
OTHERS = ("place", "optim", "clip_norm", "accumulate", "model")

ON_EIGHT_RANKS = [
    Memory(strategy="fsdp", replicas=2, precision="bf16-mixed", activation_checkpointing="full"),
    Memory(cpu_offload="parameters", replicas=4),
]


def accepted(count: int, models: Sequence[str] = MODELS) -> list[Combination]:
    """Of ``count`` random combinations those that have a plan, each with one of the models."""
    plans = [values for values in likely(count) if isinstance(ask(values), Plan)]
    return [{**values, "model": model} for values, model in zip(plans, cycle(models), strict=False)]


def answer(values: Combination) -> dict[str, Any]:
    """The fields of a prediction of the recipe with these knobs."""
    knobs: dict[str, Any] = {key: value for key, value in values.items() if key not in OTHERS}
    optim = Optim(values["optim"], weight_decay=0.1, clip_norm=values["clip_norm"])
    memory = Memory(strategy=values["place"][0], **knobs)
    recipe = recipe_of(values["model"], memory, optim, accumulate=values["accumulate"])
    return predict_in_process(recipe, decide_plan(recipe, values["place"][1]), target_of(), 1, False)


def check(combinations: Sequence[Combination]) -> None:
    """Each is predicted, or refused as it should be."""
    for package in PACKAGES:
        pytest.importorskip(package)
    for name in ("distilbert", "big_bird"):  # once, and not in each of the processes that trace
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    wrong, predicted = [], 0
    for number, result in run_in_children([partial(answer, values) for values in combinations], 2):
        fault = fault_of(result)
        predicted += isinstance(result, dict)
        if fault:
            wrong.append(f"{name_of(combinations[number])}: {fault}")
    assert not wrong, "\n".join(wrong)
    assert predicted > len(combinations) / 2


def fault_of(result: Any) -> str:
    """What is wrong with an answer, if anything."""
    if isinstance(result, RecipeError):
        names_a_key = re.search(r"\b(memory|model|optim)\.\w+", str(result))
        return "" if names_a_key and "\n" not in str(result) else f"refused without a key: {result}"
    if isinstance(result, Exception):
        return str(result)
    (cost,) = result["costs"].values()
    plausible = 0 < result["allocated"] <= result["reserved"] and cost["step_ms"] > 0
    return "" if plausible else f"{result['allocated']} bytes of {result['reserved']}, {cost['step_ms']} ms"


@pytest.mark.slow
def test_every_value_of_every_knob_is_predicted():
    quick = [name for name in MODELS if name != "bigbird"]
    check(covering(accepted(1_500, quick), 1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_two_knobs_are_predicted_together():
    """Of those that decide most which code is traced."""
    check(covering(accepted(12_000), 2, ("model", "place", "cpu_offload", "init")))


@pytest.mark.slow
@pytest.mark.parametrize("memory", ON_EIGHT_RANKS)
def test_eight_ranks_on_two_machines(memory: Memory) -> None:
    prediction = prediction_of(recipe_of("vit", memory, accumulate=2, batch_size=32), ranks=8, nodes=2)
    assert 0 < prediction.allocated <= prediction.reserved
    assert prediction.cost.step_ms > 0
