"""A trace is the same whether results are created from the form of an earlier one or by torch's fake kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.combinations import covering
from helpers.tiny import MODELS, recipe_of, target_of, trace_of
from planner.test_every_combination import accepted, answer

from trainer.fakegpu.repeats import Repeats
from trainer.fakegpu.tracer import tracing
from trainer.recipe import Memory
from trainer.system.child_jobs import run_in_child, run_in_children


def by_torch(self: Repeats, func: Any, args: Any, kwargs: dict[str, Any], usual: Callable[[], Any]) -> Any:
    """Always run torch's kernel."""
    return usual()


def trace(name: str, memory: dict[str, Any], repeats: bool) -> list[Any]:
    """All events, operations and notes."""
    if not repeats:
        Repeats.result = by_torch
    found = trace_of(recipe_of(name, Memory(**memory), accumulate=2), ranks=2 if "strategy" in memory else 1)
    return [found.events, found.work, found.marks, found.categories, found.host_bytes, found.guesses, found.notes]


MEMORY = [
    {},
    {"activation_checkpointing": "full", "precision": "bf16-mixed", "cpu_offload": "optimizer"},
    {"strategy": "fsdp", "precision": "bf16-mixed"},
]


def test_traces_are_the_same():
    jobs = [partial(trace, "vit", memory, repeats) for memory in MEMORY for repeats in (True, False)]
    found = dict(run_in_children(jobs, 2))
    for at, memory in enumerate(MEMORY):
        assert len(found[2 * at][0]) > 100
        assert found[2 * at] == found[2 * at + 1], memory


def answered(values: dict[str, Any], repeats: bool) -> dict[str, Any]:
    if not repeats:
        Repeats.result = by_torch
    return {key: value for key, value in answer(values).items() if "seconds" not in key}


@pytest.mark.slow
def test_predictions_with_every_value_of_a_knob_are_the_same():
    for package in ("torchao", "timm", "peft"):
        pytest.importorskip(package)
    named = [name for name in MODELS if name not in ("branch", "two_losses", "batchnorm")]  # often rejected later
    combinations = covering(accepted(1_500, named), 1)
    jobs = [partial(answered, values, repeats) for values in combinations for repeats in (True, False)]
    found = {number: result if isinstance(result, dict) else str(result) for number, result in run_in_children(jobs, 2)}
    assert [at for at in range(0, len(jobs), 2) if found[at] != found[at + 1]] == []
    assert sum(isinstance(result, dict) for result in found.values()) > 0.75 * len(jobs)  # a run rejects some


def shared() -> list[Any]:
    """Whether results share memory and where they start; the number of memories of two sums; whether forms are kept."""
    with tracing(target_of()) as tracer:
        base = torch.zeros(4, 6, device="cuda")
        strided = [one.as_strided((2,), (1,), 5) for one in (base, base[0])]
        parts = [[base[1:], base[2:]], [base.t(), base.t()], strided, [base.add_(1), base.add_(1)]]
        parts += [[base + 1, base + 1], [base[1].view(torch.int32), base[2].view(torch.int32)]]
        rows = [base[1:3], base[2:4]]
        parts.append([rows[0][1], rows[1][1]])
        memory = base.untyped_storage()._cdata
        found = [[[one.untyped_storage()._cdata == memory, one.storage_offset()] for one in pair] for pair in parts]
        sizes = [len({one.untyped_storage()._cdata for one in parts[4]}), len(tracer.mode.repeats.forms) > 0]
    return [found, sizes]


def test_views_start_where_torch_says():
    found, sizes = run_in_child(shared)
    starts = [[6, 12], [0, 0], [5, 5], [0, 0], None, [6, 12], [12, 18]]
    for at, start in enumerate(starts):
        assert found[at] == ([[False, 0]] * 2 if start is None else [[True, one] for one in start]), at
    assert sizes == [2, True]
