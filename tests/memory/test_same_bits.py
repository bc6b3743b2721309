"""What docs/techniques.md says exactly: which techniques change no bit, and how many bytes a weight takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.matrix import Case, set_up, stacked_run

from trainer.memory.plan import decide_plan
from trainer.recipe import Memory

KNOBS: list[dict[str, Any]] = [
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": 0.5},
    {"activation_offload": True},
    {"activation_offload": True, "activation_checkpointing": "full"},
    {"cpu_offload": "optimizer"},
    {"cpu_offload": "parameters"},
]


def memory(precision: str, **knobs: Any) -> Memory:
    return Memory(micro_batch_size=3, precision=precision, **knobs)


@pytest.mark.parametrize("name", ["vit", "distilbert"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_not_a_bit_changes_on_one_rank(name, precision):
    plain = stacked_run(Case(name, memory(precision), dropout=0.2))
    for knobs in KNOBS:
        if precision == "bf16-mixed" and knobs.get("cpu_offload") == "parameters":
            continue  # FSDP casts weights where autocast casts some operations: see test_stack_equality.py
        ours = stacked_run(Case(name, memory(precision, **knobs), dropout=0.2))
        changed = [key for key, value in plain["state"].items() if not torch.equal(value, ours["state"][key])]
        assert (changed, ours["losses"]) == ([], plain["losses"]), knobs


@pytest.mark.parametrize(
    ("precision", "of_layers", "of_norms"),
    [("32-true", 4, 4), ("bf16-mixed", 2, 4), ("16-mixed", 2, 4), ("bf16-true", 2, 2)],
)
def test_bytes_of_a_weight_on_the_device_and_on_the_host_with_the_optimizer_offloaded(precision, of_layers, of_norms):
    case = Case("vit", memory(precision, cpu_offload="optimizer"))
    _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, 1))
    stepper.step(next(iter(windows.epoch(0, 0, 1))))
    for name, parameter in stack.module.named_parameters():
        is_norm = ".ln" in name or name in ("class_token", "encoder.pos_embedding")
        assert parameter.element_size() == (of_norms if is_norm else of_layers), name
        assert parameter.grad is None
    master, gradient, state = 4, 4, 8
    weights = sum(p.numel() for p in stack.module.parameters())
    held = [
        *stack.masters.values(),
        *stepper.sync.homes.values(),
        *(t for s in stepper.optimizer.state.values() for t in (s["exp_avg"], s["exp_avg_sq"])),
    ]
    assert sum(t.nbytes for t in held) == (master + gradient + state) * weights
