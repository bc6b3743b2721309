"""Ranks that share every block take the steps of one rank, and their checkpoints are read by any number of ranks."""

from __future__ import annotations

import pytest
from helpers.matrix import Case, difference, plain_run, stacked_run

from trainer.recipe import Memory


def case_of(name: str, ranks: int, precision: str = "64-true", dropout: float = 0.2, **knobs: object) -> Case:
    memory = Memory(**{"precision": precision, "micro_batch_size": 3, "tensor_parallel": 2, **knobs})
    return Case(name, memory, ranks, dropout)


@pytest.mark.parametrize("name", ["vit", "distilbert", "bigbird"])
def test_two_ranks_that_share_blocks_take_the_steps_of_one_with_its_dropout(name, ranks):
    case = case_of(name, 2)
    assert max(difference(ranks(2).run(stacked_run, case)[0], plain_run(case)).values()) <= 1e-12


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_groups_of_two_ranks(strategy, ranks):
    case = case_of("vit", 4, strategy=strategy)
    assert max(difference(ranks(4).run(stacked_run, case)[0], plain_run(case)).values()) <= 1e-12
