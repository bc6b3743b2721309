"""Ranks that share every block take the steps of one rank, and their checkpoints are read by any number of ranks."""

from __future__ import annotations

from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from helpers.matrix import Case, difference, plain_run, stacked_run
from helpers.resumed import assert_same_weights, losses, recipe, resume, saved

from trainer.fit import fit
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


WORLDS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "tp2 × dp2": (4, {"tensor_parallel": 2}),
    "tp2 × fsdp2": (4, {"tensor_parallel": 2, "strategy": "fsdp"}),
    "fsdp2": (2, {"strategy": "fsdp"}),
}


def trained(world: str, ranks: Any, run_dir: Path, of: tuple[str, int] | None = None) -> Path:
    """A run on ``world``, from its start, or from the checkpoint of another run after some steps."""
    size, knobs = WORLDS[world]
    memory = {"micro_batch_size": 4, "precision": "64-true", **knobs}
    changes = {"memory": memory, "run": {"evaluate": True, "allow_change": ["memory"]}}
    if of is None:
        call = partial(fit, recipe(run_dir, **changes))
    else:
        call = partial(resume, Path(of[0]), run_dir, of[1], **changes)
    call() if size == 1 else ranks(size).run(call)
    return run_dir


def assert_same_run(run_dir: Path, other: Path) -> None:
    """The losses, the weights and the evaluation, in which every sample counts once."""
    assert losses(run_dir) == pytest.approx(losses(other), rel=1e-11)
    assert_same_weights(run_dir, other, 1e-10, 1e-11)
    reports = [(folder / "classification_report.txt").read_text() for folder in (run_dir, other)]
    assert reports[0] == reports[1]


@pytest.mark.usefixtures("no_pictures")
def test_a_checkpoint_of_ranks_that_share_blocks_is_that_of_one_rank(ranks, tmp_path):
    one, two = trained("1", ranks, tmp_path / "one"), trained("tp2", ranks, tmp_path / "two")
    assert_same_run(two, one)
    assert_same_run(trained("1", ranks, tmp_path / "two-one", (str(two), 2)), one)
    assert_same_run(trained("tp2", ranks, tmp_path / "one-two", (str(one), 4)), one)
    trained("tp2", ranks, tmp_path / "again", (str(two), 2))
    assert saved(tmp_path / "again", 6) == saved(two, 6)  # bit for bit


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_checkpoint_of_any_world_is_read_by_any_other(ranks, tmp_path):
    runs = {world: trained(world, ranks, tmp_path / world) for world in WORLDS}
    for source, target in permutations(WORLDS, 2):
        if {source, target} & {"tp2 × dp2", "tp2 × fsdp2"}:
            assert_same_run(trained(target, ranks, tmp_path / f"{source}-{target}", (str(runs[source]), 4)), runs["1"])
