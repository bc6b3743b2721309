"""Every combination of memory techniques takes the steps of a plain PyTorch loop without any.

There is each pair of settings of two axes; ``test_combinations.py`` has more knobs, on a smaller model.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.combinations import covering
from helpers.matrix import Case, difference, plain_run, set_up, stacked_run
from helpers.rounding import ROUNDING

from trainer.memory.plan import decide_plan
from trainer.recipe import Memory

MODELS = ["vit", "distilbert", "bigbird"]
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2}
CHECKPOINTING = ["none", "selective", "full"]
OFFLOAD = ["none", "optimizer", "parameters"]
CUTS = {"whole": 8, "ragged": 3}
"""Most samples of a micro-batch: one a rank and step, or several of unequal size (the batches have 8 and 3 samples)."""

ALL = [
    combination
    for combination in product(MODELS, STRATEGIES, CHECKPOINTING, OFFLOAD, CUTS)
    if (combination[1], combination[3]) != ("ddp", "parameters")  # refused
]
AXES = ("model", "strategy", "checkpointing", "offload", "cut")
COVERING = [tuple(c.values()) for c in covering([dict(zip(AXES, c, strict=True)) for c in ALL], 2, AXES)]
"""Every pair of settings of two axes."""
LIMITS = {"64-true": ROUNDING, "32-true": 1e-6}


def memory_of(strategy: str, precision: str, **knobs: object) -> Memory:
    return Memory(**{"strategy": strategy, "precision": precision, "micro_batch_size": 3, **knobs})


def run(case: Case, ranks: object) -> dict:
    return stacked_run(case) if case.world_size == 1 else ranks(case.world_size).run(stacked_run, case)[0]


@pytest.mark.first(1)
@pytest.mark.parametrize("combination", COVERING, ids="-".join)
def test_the_steps_are_those_of_a_plain_loop(combination, ranks):
    name, strategy, checkpointing, offload, cut = combination
    precision = [*LIMITS][COVERING.index(combination) % 4 == 3]
    size = min(CUTS[cut], 8 // STRATEGIES[strategy])
    knobs = {"activation_checkpointing": checkpointing, "cpu_offload": offload, "micro_batch_size": size}
    case = Case(name, memory_of(strategy, precision, **knobs), STRATEGIES[strategy], dropout=0.2)
    assert max(difference(run(case, ranks), plain_run(case)).values()) <= LIMITS[precision]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "precision", "strategy", "knobs"),
    [
        ("vit", "32-true", "single", {"activation_checkpointing": 0.5}),
        ("distilbert", "64-true", "single", {"activation_offload": True}),
        ("bigbird", "32-true", "fsdp", {"activation_offload": True, "activation_checkpointing": "full"}),
        ("vit", "64-true", "fsdp", {"reshard_after_forward": False}),
        ("distilbert", "32-true", "fsdp", {"sync_every_micro_step": True}),
        ("bigbird", "64-true", "fsdp", {"replicas": 2}),
        ("vit", "32-true", "fsdp", {"replicas": 2, "cpu_offload": "optimizer"}),
        ("distilbert", "64-true", "fsdp", {"replicas": 2, "cpu_offload": "parameters"}),
    ],
)
def test_other_knobs_take_the_steps_of_a_plain_loop(name, precision, strategy, knobs, ranks):
    case = Case(name, memory_of(strategy, precision, **knobs), STRATEGIES[strategy], dropout=0.2)
    assert max(difference(run(case, ranks), plain_run(case)).values()) <= LIMITS[precision]


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "strategy"), list(zip(MODELS, STRATEGIES, strict=True)))
def test_mixed_precision_with_techniques_is_mixed_precision_without(name, strategy, ranks):
    """With the optimizer offloaded the device has half of the weights in bfloat16, and AdamW the same input."""
    world_size = STRATEGIES[strategy]
    case = Case(name, memory_of(strategy, "bf16-mixed", activation_checkpointing="full"), world_size, dropout=0.2)
    offloaded = Case(name, memory_of(strategy, "bf16-mixed", cpu_offload="optimizer"), world_size, dropout=0.2)
    plain, ours, masters = plain_run(case), run(case, ranks), run(offloaded, ranks)
    assert max(difference(ours, masters).values()) <= 1e-6
    assert all(tensor.dtype == torch.float32 for tensor in masters["state"].values() if tensor.is_floating_point())
    found = difference(ours, plain)
    if strategy != "fsdp":
        assert max(found.values()) <= 1e-6
        return
    # FSDP casts weights where autocast casts some operations: more is rounded, to the same number of bits.
    exact = plain_run(Case(name, memory_of(strategy, "32-true"), world_size, dropout=0.2))
    rounding = difference(plain, exact)
    assert found["parameters"] <= 5 * rounding["parameters"], (found, rounding)
    assert found["losses"] <= 5 * max(rounding["losses"], 2**-9), (found, rounding)


# What docs/techniques/ says exactly: which techniques change no bit, and how many bytes a weight takes.

NO_BIT_CHANGES = (
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": 0.5},
    {"activation_offload": True},
    {"activation_offload": True, "activation_checkpointing": "full"},
    {"cpu_offload": "optimizer"},
    {"cpu_offload": "parameters"},
)


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "precision"), [("vit", "bf16-mixed"), ("distilbert", "32-true")])
def test_not_a_bit_changes_on_one_rank(name, precision):
    plain = stacked_run(Case(name, memory_of("auto", precision), dropout=0.2))
    for knobs in NO_BIT_CHANGES:
        if precision == "bf16-mixed" and knobs.get("cpu_offload") == "parameters":
            continue  # FSDP casts weights where autocast casts some operations
        ours = stacked_run(Case(name, memory_of("auto", precision, **knobs), dropout=0.2))
        changed = [key for key, value in plain["state"].items() if not torch.equal(value, ours["state"][key])]
        assert (changed, ours["losses"]) == ([], plain["losses"]), knobs


@pytest.mark.parametrize(
    ("precision", "of_layers", "of_norms"),
    [("32-true", 4, 4), ("bf16-mixed", 2, 4), ("16-mixed", 2, 4), ("bf16-true", 2, 2)],
)
def test_bytes_of_a_weight_on_the_device_and_on_the_host_with_the_optimizer_offloaded(precision, of_layers, of_norms):
    case = Case("vit", memory_of("auto", precision, cpu_offload="optimizer"))
    _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, 1))
    stepper.step(next(iter(windows.epoch(0, 0, 1))))
    for name, parameter in stack.module.named_parameters():
        is_norm = ".ln" in name or name in ("class_token", "encoder.pos_embedding")
        assert parameter.element_size() == (of_norms if is_norm else of_layers), name
        assert parameter.grad is None
    master, gradient, state = 4, 4, 8
    states = [s[key] for s in stepper.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    held = sum(t.nbytes for t in [*stack.masters.values(), *stepper.sync.accumulators.values(), *states])
    assert held == (master + gradient + state) * sum(p.numel() for p in stack.module.parameters())
