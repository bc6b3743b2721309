"""What a recovery keeps of training while the model is built anew is what was there, bit for bit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from helpers.matrix import Case, set_up

from trainer import Memory
from trainer.contract import Model
from trainer.memory.plan import decide_plan
from trainer.run.state import TensorState


@dataclass(frozen=True)
class Wide(Case):
    """With matrices that are large enough for states of 8 and 4 bits."""

    @property
    def model(self) -> Model:
        return dataclasses.replace(super().model, width=64, mlp_width=256)


def take_over(case: Case) -> list[str]:
    """Take two steps, build everything anew, and go on in both; the names of this rank's tensors."""
    plan = decide_plan(case.recipe, case.world_size)
    (_, stepper, windows, stack), (_, other, _, built) = set_up(case, plan), set_up(case, plan)
    for window in windows.epoch(0, 0, 2):
        stepper.step(window)
    before, after = TensorState(stack, stepper), TensorState(built, other)
    kept = before.on_host()
    after.make_state(kept)
    after.load_state_dict(kept)
    _require_equal(before, after)
    (window,) = windows.epoch(0, 2, 3)
    assert stepper.step(window) == other.step(window)
    _require_equal(before, after)
    return list(after.parts())


def _require_equal(before: TensorState, after: TensorState) -> None:
    ours, theirs = before.parts(), after.parts()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name].tensor, theirs[name].tensor)] == []
    assert before.scalars() == after.scalars()


MEMORIES = [
    {"strategy": "ddp", "cpu_offload": "optimizer", "precision": "bf16-mixed"},
    {"strategy": "fsdp", "optimizer_state_bits": 8},
    pytest.param({"strategy": "fsdp", "cpu_offload": "parameters"}, marks=pytest.mark.slow),
    pytest.param({"strategy": "ddp", "optimizer_state_bits": 8}, marks=pytest.mark.slow),
    pytest.param({"strategy": "fsdp", "optimizer_state_bits": 4}, marks=pytest.mark.slow),
    pytest.param({"strategy": "fsdp", "precision": "bf16-true", "stochastic_rounding": True}, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_what_is_kept_is_what_was_there(memory, ranks):
    names = ranks(2).run(take_over, Wide("vit", Memory(micro_batch_size=2, **memory), 2))[0]
    assert any("/codes@" in name for name in names) == ("optimizer_state_bits" in memory)
