"""Every combination of memory techniques takes the steps of a plain PyTorch loop without any.

In every run there is each pair of settings of two axes, with ``-m slow`` every fifth combination of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from helpers.combinations import covering
from helpers.matrix import Case, difference, plain_run, stacked_run

from trainer.recipe import Memory, Optim

MODELS = ["vit", "distilbert", "bigbird"]
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2}
CHECKPOINTING = ["none", "selective", "full"]
OFFLOAD = ["none", "optimizer", "parameters"]
CUTS = {"whole": 8, "ragged": 3}
"""Most samples of a micro-batch: one a rank and step, or several of unequal size (the batches have 8 and 3 samples)."""

ALL = [
    combination
    for combination in product(MODELS, STRATEGIES, CHECKPOINTING, OFFLOAD, CUTS)
    if (combination[1], combination[3]) != ("ddp", "parameters")  # refused: see test_refusals.py
]
AXES = ("model", "strategy", "checkpointing", "offload", "cut")
COVERING = [tuple(c.values()) for c in covering([dict(zip(AXES, c, strict=True)) for c in ALL], 2, AXES)]
"""Every pair of settings of two axes."""


def once_each(cases: Sequence[object]) -> list[object]:
    """Each of ``cases`` with each model, of which all but one are slow."""
    return [
        pytest.param(name, case, marks=() if MODELS[number % len(MODELS)] == name else pytest.mark.slow)
        for number, case in enumerate(cases)
        for name in MODELS
    ]


def check(combination: tuple, ranks: object, precision: str, tolerance: dict[str, float]) -> None:
    name, strategy, checkpointing, offload, cut = combination
    world_size = STRATEGIES[strategy]
    memory = Memory(
        strategy=strategy,
        activation_checkpointing=checkpointing,
        cpu_offload=offload,
        micro_batch_size=min(CUTS[cut], 8 // world_size),
        precision=precision,
    )
    case = Case(name, memory, world_size, dropout=0.2)
    found = difference(run(case, ranks), plain_run(case))
    assert {key: error for key, error in found.items() if not error <= tolerance[key]} == {}


def run(case: Case, ranks: object) -> dict:
    return stacked_run(case) if case.world_size == 1 else ranks(case.world_size).run(stacked_run, case)[0]


@pytest.mark.parametrize("combination", COVERING, ids="-".join)
def test_the_steps_are_those_of_a_plain_loop(combination, ranks):
    check(combination, ranks, "64-true", {"parameters": 1e-12, "losses": 1e-12})
    check(combination, ranks, "32-true", {"parameters": 1e-6, "losses": 1e-6})


@pytest.mark.slow
@pytest.mark.parametrize("combination", [c for c in ALL[::5] if c not in COVERING], ids="-".join)
def test_more_of_the_matrix(combination, ranks):
    check(combination, ranks, "64-true", {"parameters": 1e-12, "losses": 1e-12})
    check(combination, ranks, "32-true", {"parameters": 1e-6, "losses": 1e-6})


OTHERS = [
    {"activation_checkpointing": 0.5},
    {"activation_offload": True},
    {"activation_offload": True, "activation_checkpointing": "full", "strategy": "fsdp"},
    {"strategy": "fsdp", "reshard_after_forward": False},
    {"strategy": "fsdp", "sync_every_micro_step": True},
    {"strategy": "fsdp", "replicas": 2},
    {"strategy": "fsdp", "replicas": 2, "cpu_offload": "optimizer"},
    {"strategy": "fsdp", "replicas": 2, "cpu_offload": "parameters"},
]


@pytest.mark.parametrize(("name", "knobs"), once_each(OTHERS), ids=str)
def test_other_knobs_take_the_steps_of_a_plain_loop(name, knobs, ranks):
    world_size = STRATEGIES[knobs.get("strategy", "single")]
    for precision, limit in {"64-true": 1e-12, "32-true": 1e-6}.items():
        case = Case(name, Memory(micro_batch_size=3, precision=precision, **knobs), world_size, dropout=0.2)
        found = difference(run(case, ranks), plain_run(case))
        assert max(found.values()) <= limit, (precision, found)


@pytest.mark.parametrize(("name", "strategy"), once_each([*STRATEGIES]))
def test_mixed_precision_with_techniques_is_mixed_precision_without(name, strategy, ranks):
    world_size = STRATEGIES[strategy]
    shared = {
        "strategy": strategy,
        "precision": "bf16-mixed",
        "micro_batch_size": 3,
        "activation_checkpointing": "full",
    }
    case = Case(name, Memory(**shared), world_size, dropout=0.2)
    plain, ours = plain_run(case), run(case, ranks)
    found = difference(ours, plain)
    if strategy != "fsdp":
        assert max(found.values()) <= 1e-6
        return
    # FSDP casts weights where autocast casts some operations: more is rounded, to the same number of bits.
    exact = plain_run(Case(name, Memory(strategy=strategy, micro_batch_size=3), world_size, dropout=0.2))
    rounding = difference(plain, exact)
    assert found["parameters"] <= 5 * rounding["parameters"], (found, rounding)
    assert found["losses"] <= 5 * max(rounding["losses"], 2**-9), (found, rounding)


@pytest.mark.parametrize(("name", "strategy"), once_each([*STRATEGIES]))
def test_optimizer_offload_is_mixed_precision_adamw_on_the_device(name, strategy, ranks):
    """The device has half of the weights in bfloat16, and the result is the same to the last bit of AdamW's input."""
    world_size = STRATEGIES[strategy]
    shared = {"strategy": strategy, "precision": "bf16-mixed", "micro_batch_size": 3}
    runs = [
        run(Case(name, Memory(cpu_offload=offload, **shared), world_size, dropout=0.2), ranks)
        for offload in ("none", "optimizer")
    ]
    found = difference(*runs)
    assert max(found.values()) <= 1e-6
    assert all(tensor.dtype == torch.float32 for tensor in runs[1]["state"].values() if tensor.is_floating_point())


@pytest.mark.parametrize("optim", [Optim("sgd", lr=0.1, momentum=0.9), Optim("adam", lr=1e-3, clip_norm=0.1)])
@pytest.mark.parametrize("knobs", [{"strategy": "fsdp"}, {"strategy": "fsdp", "cpu_offload": "optimizer"}], ids=str)
def test_other_optimizers_shard_too(optim, knobs, ranks):
    alone = stacked_run(Case("vit", Memory(micro_batch_size=2, precision="64-true"), optim=optim))
    case = Case("vit", Memory(micro_batch_size=2, precision="64-true", **knobs), 2, optim=optim)
    assert max(difference(run(case, ranks), alone).values()) <= 1e-12
