"""Batches that are smaller than the ranks are many, and gradients that are not finite on one rank only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import matrix
from helpers.combinations import Trained, plain_losses, tower_file, train
from torch import Tensor

from trainer.engine.schedule import CheckpointableLambdaLR
from trainer.memory.plan import decide_plan
from trainer.memory.sharding import local_shard
from trainer.recipe import Memory, Optim

PLACES = {
    "ddp": {"strategy": "ddp"},
    "ddp-optimizer": {"strategy": "ddp", "cpu_offload": "optimizer"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp-replicas": {"strategy": "fsdp", "replicas": 2},
    "fsdp-optimizer": {"strategy": "fsdp", "cpu_offload": "optimizer"},
    "fsdp-parameters": {"strategy": "fsdp", "cpu_offload": "parameters"},
}
ALTERNATING = list(zip(PLACES, (1, 3, 3, 3, 1, 1), strict=True))
OPTIM = Optim("adamw", lr=1e-3, weight_decay=0.1, clip_norm=0.5)
DECAY = 0.5


def case_at(place: str, precision: str = "32-true", **options: Any) -> Trained:
    memory = Memory(precision=precision, **PLACES[place])
    return Trained("tower", memory, 2, optim=OPTIM, weights=tower_file(), **options)


@pytest.mark.first(2)
@pytest.mark.parametrize(("place", "accumulate"), ALTERNATING)
def test_a_batch_of_fewer_samples_than_ranks_counts_as_what_it_is(place, accumulate, ranks):
    case = case_at(place, size=13, accumulate=accumulate)  # batches of 12 and of 1
    for losses in ranks(2).run(train, case, seconds=60):
        assert losses == pytest.approx(plain_losses(case), rel=1e-6)


def test_a_rank_without_samples_updates_in_backward_as_the_others(ranks):
    memory = Memory(strategy="fsdp", optimizer_in_backward=True)
    case = Trained("tower", memory, 2, optim=replace(OPTIM, clip_norm=None), weights=tower_file(), size=13)
    for losses in ranks(2).run(train, case, seconds=60):
        assert losses == pytest.approx(plain_losses(case), rel=1e-6)


def steps_around(case: Trained, steps: tuple[int, ...], spoiled: int | None) -> dict[str, Any]:
    """Take ``steps``; in one of them the last rank's last micro-batch has a gradient that is not finite."""
    fabric, stepper, windows, stack = matrix.set_up(case, decide_plan(case.recipe, case.world_size))
    stepper.scheduler = CheckpointableLambdaLR(stepper.optimizer, lambda step: DECAY**step)
    losses, scales = [], []
    for step in steps:
        (window,) = windows.epoch(*divmod(step, 3), step % 3 + 1)
        if step == spoiled and fabric.global_rank == case.world_size - 1:
            window.micro_batches[-1].batch["spoil"] = True
        before = state_of(stepper, stack)
        result = stepper.step(window)
        assert result.skipped == (step == spoiled)
        if result.skipped:
            after = state_of(stepper, stack)
            assert len(before) == len(after)
            assert all(map(torch.equal, before, after))
        else:
            losses.append(result.loss)
        scaler = getattr(stepper.precision, "scaler", None)
        scales.append(scaler.get_scale() if scaler else None)
    return {"losses": losses, "scales": scales}


def state_of(stepper: Any, stack: Any) -> list[Tensor]:
    """Copies of this rank's weights, optimizer state and schedule."""
    weights = [*stack.module.parameters(), *(stack.masters or {}).values()]
    state = [value for one in stepper.optimizer.state.values() for value in one.values() if torch.is_tensor(value)]
    rates = [*stepper.scheduler.get_last_lr(), *(group["lr"] for group in stepper.optimizer.param_groups)]
    return [local_shard(tensor.detach()).clone() for tensor in [*weights, *state, torch.tensor(rates)]]


@pytest.mark.first(2)
@pytest.mark.parametrize(("place", "accumulate"), [(place, 4 - count) for place, count in ALTERNATING])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(place, accumulate, ranks):
    case = case_at(place, accumulate=accumulate)
    results = ranks(2).run(steps_around, case, (0, 1, 2, 3), 1)
    plain = plain_losses(case, (0, 2, 3), DECAY)
    for result in results:
        assert result["losses"] == pytest.approx(plain, rel=1e-6)


@pytest.mark.first(2)
@pytest.mark.parametrize("place", ["ddp", "ddp-optimizer", "fsdp-replicas", "fsdp-parameters"])
def test_all_ranks_lower_the_loss_scale_alike(place, ranks):
    """In fp16 a skipped step is how the scale is found: ranks with different ones would add up unlike gradients."""
    case = case_at(place, "16-mixed")
    results = ranks(2).run(steps_around, case, (0, 1, 2), 1)
    unspoiled = ranks(2).run(steps_around, case, (0, 2), None)
    for result in results:
        before, *after = result["scales"]
        assert after == [before / 2] * 2
        assert result["losses"] == pytest.approx(unspoiled[0]["losses"], rel=1e-4)


@pytest.mark.parametrize("place", ["ddp-optimizer", "fsdp"])
def test_weights_in_half_precision_skip_alike(place, ranks):
    first, second = ranks(2).run(steps_around, case_at(place, "bf16-true"), (0, 1, 2), 1)
    assert first == second
