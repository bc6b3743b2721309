"""The line on what would be faster on a GPU: only what the recipe and the card allow, and what is worth it."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.tiny import prediction_of, recipe_of

from trainer.fakegpu.cost import StepCost
from trainer.fakegpu.gpus import gpu_named, host_as_device
from trainer.fakegpu.prediction import Prediction
from trainer.memory.plan import with_precision
from trainer.planner.predict import FASTER, candidates, faster
from trainer.recipe import Memory, Recipe, Run

H100, V100, T4 = (gpu_named(name) for name in ("h100-sxm", "v100-16gb", "t4"))
BF16, TF32, COMPILE = FASTER


def recipe(memory: Memory | None = None, **run: Any) -> Recipe:
    return recipe_of("vit", memory or Memory(micro_batch_size=4), run=Run(**run))


def predicted(step_ms: float, **others: float) -> Prediction:
    """A step, and what it takes with the settings of ``FASTER`` whose first word is given."""
    known = {flag: others[flag.split()[0]] for flag in FASTER if flag.split()[0] in others}
    cost = StepCost(step_ms, step_ms, 0, 0, 0, 0, 0, 0)
    return Prediction(1, 1, 1, {}, {}, [], "", {"ib-hdr": cost}, {}, 0.0, faster=known)


@pytest.mark.parametrize(
    ("gpu", "settings", "expected"),
    [
        (H100, {}, [BF16, TF32, COMPILE]),
        (V100, {}, [COMPILE]),  # no units for bfloat16 or TF32
        (T4, {}, [COMPILE]),
        (host_as_device(), {}, []),
        (H100, {"precision": "bf16-mixed"}, [COMPILE]),  # few products of fp32 are left
        (H100, {"precision": "64-true"}, [COMPILE]),
        (H100, {"precision": "16-mixed", "compile": "blocks"}, []),
        (H100, {"matmul_precision": "high"}, [BF16, COMPILE]),
        (H100, {"compile": "model"}, [BF16, TF32]),
    ],
)
def test_what_may_be_faster_depends_on_the_card_and_on_what_is_set(gpu: Any, settings: Any, expected: Any) -> None:
    assert candidates(recipe(Memory(micro_batch_size=4, **settings)), 1, gpu) == expected


def test_what_the_recipe_cannot_be_run_with_is_not_named() -> None:
    assert candidates(recipe(deterministic=True), 1, H100) == [BF16, TF32]  # excludes compiled code
    split = Memory(micro_batch_size=4, tensor_parallel=2)
    assert candidates(recipe(split), 2, H100) == [BF16, TF32]  # compiled, it is not known to be right


def test_the_line_names_what_saves_a_tenth_of_a_step_the_fastest_first() -> None:
    found = predicted(171.0, precision=62.04, matmul_precision=98.0, compile=154.0)
    assert faster(recipe(), 1, H100, found) == [
        "faster than 171 ms per step (estimate), each on its own: --memory.precision bf16-mixed (62 ms), "
        "--memory.matmul_precision high (98 ms)"
    ]
    assert faster(recipe(), 1, H100, predicted(100.0, precision=91.0, compile=99.0)) == []
    assert faster(recipe(), 1, host_as_device(), predicted(100.0)) == []


def test_without_a_prediction_flags_are_named_without_times() -> None:
    names = "--memory.compile blocks, --memory.matmul_precision high, --memory.precision bf16-mixed"
    assert faster(recipe(), 1, H100, None) == [f"faster perhaps, each on its own: {names}"]
    assert faster(recipe(), 1, host_as_device(), None) == []


@pytest.mark.slow
def test_a_prediction_prices_them_on_the_same_trace() -> None:
    """A tiny model is bound by its launches, which only compiling spares."""
    asked = recipe()
    found = prediction_of(asked, gpu="h100-sxm")
    assert list(found.faster) == [BF16, TF32, COMPILE]
    now = found.cost.step_ms
    assert found.faster[COMPILE] < 0.9 * now
    assert found.faster[BF16] == pytest.approx(now, rel=0.02)
    assert [line.count("--memory.") for line in faster(asked, 1, H100, found)] == [1]


@pytest.mark.slow
def test_a_prediction_prices_only_what_the_card_and_the_recipe_allow() -> None:
    asked = recipe()
    on_v100 = prediction_of(with_precision(asked, V100.capability), gpu="v100-16gb")
    assert list(on_v100.faster) == [COMPILE]
    set_already = asked.replace(memory=Memory(compile="blocks", precision="bf16-mixed"))
    assert prediction_of(set_already).faster == {}
