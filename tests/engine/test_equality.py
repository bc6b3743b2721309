"""The promise: however a batch is cut and on however many ranks, the same weights as one process with whole batches."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from helpers.problems import Problem, engine_run, errors, plain_run
from hypothesis import example, given, settings
from hypothesis import strategies as st

# Relative tolerances of weights, their change over three steps, losses and gradient norms.
TOLERANCE = {
    "64-true": {"weights": 1e-12, "change": 1e-10, "losses": 1e-12, "norms": 1e-10},
    "32-true": {"weights": 1e-6, "change": 1e-4, "losses": 1e-6, "norms": 1e-4},
}
MODELS = ["vit", "distilbert", "bigbird", "mlp"]
CUTS = [1, 2, 7, 1000]
# Three steps each: of full batches; with a last batch of 3 samples; with a last batch of 1, fewer than 2 or 3 ranks.
BATCHES = {"even": (24, 8), "ragged": (19, 8), "fewer than ranks": (17, 8)}


def check(ours: dict, plain: dict, precision: str) -> None:
    if not all(map(math.isfinite, plain["losses"])):  # a batch without a single label: its mean is 0 / 0
        assert any(ours["skipped"])
        return
    found = errors(ours, plain)
    assert {key: error for key, error in found.items() if not error <= TOLERANCE[precision][key]} == {}


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_on_one_rank_equals_the_plain_loop(name, batch, precision):
    for cut in CUTS:
        problem = Problem(name, *BATCHES[batch], micro_batch_size=cut, precision=precision)
        check(engine_run(problem), plain_run(problem), precision)


MOST_UNEVEN = "fewer than ranks"
ON_RANKS = [
    pytest.param(world_size, batch, marks=pytest.mark.slow if world_size == 3 and batch != MOST_UNEVEN else ())
    for world_size in (2, 3)
    for batch in BATCHES
]


@pytest.mark.parametrize(("world_size", "batch"), ON_RANKS)
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_on_several_ranks_equals_the_plain_loop(name, batch, world_size, ranks):
    for precision in ["64-true", "32-true"] if world_size == 2 else ["64-true"]:
        for cut in CUTS:
            problem = Problem(name, *BATCHES[batch], micro_batch_size=cut, precision=precision)
            plain = plain_run(problem)
            answers = ranks(world_size).run(engine_run, problem, world_size)
            for answer in answers:
                check(answer, plain, precision)
            assert all(torch.equal(answer["after"], answers[0]["after"]) for answer in answers)


problems = st.builds(
    Problem,
    name=st.sampled_from([*MODELS, "tagger", "two_losses", "unused", "branch"]),
    size=st.integers(1, 30),
    batch_size=st.integers(1, 17),
    micro_batch_size=st.integers(1, 18),
    micro_batch_tokens=st.none() | st.integers(8, 200),
    by_length=st.booleans(),
    clip_norm=st.none() | st.floats(0.01, 1.0),
    seed=st.integers(0, 1000),
)


@settings(max_examples=40)
@given(problems)
@example(Problem("tagger", 13, 13, 4))
@example(Problem("two_losses", 13, 5, 2))
def test_drawn_cuts_on_one_rank(problem):
    check(engine_run(problem), plain_run(problem), "64-true")


@settings(max_examples=40)
@given(problem=problems)
@example(problem=Problem("tagger", 13, 13, 4))
@example(problem=Problem("two_losses", 13, 5, 2))
def test_drawn_cuts_on_two_ranks(problem, ranks):
    plain = plain_run(problem)
    for answer in ranks(2).run(engine_run, problem, 2):
        check(answer, plain, "64-true")


# ----------------------------------------------------------------------------------------------------------------------
# Checks of the checks: a planted fault must be found.


def plant_mean_of_means(stepper, windows):
    """What gradient accumulation usually does: every micro-batch's mean counts alike."""
    whole = windows.epoch

    def epoch(*args, **kwargs):
        for window in whole(*args, **kwargs):
            honest = stepper.precision.backward
            weights = iter([sum(windows.weigh(micro.batch).values()) for micro in window])

            def backward(tensor, module, *scale, window=window, weights=weights, honest=honest):
                share = next(weights) * len(window) / window.weights["loss"]
                honest(tensor / share, module, *scale)

            stepper.precision.backward = backward
            yield window
            stepper.precision.backward = honest

    windows.epoch = epoch


def test_a_planted_mean_of_means_is_found():
    even = Problem("mlp", 24, 8, 2)
    check(engine_run(even, prepare=plant_mean_of_means), plain_run(even), "64-true")  # there it is exact
    ragged = Problem("mlp", 15, 5, 2)
    assert errors(engine_run(ragged, prepare=plant_mean_of_means), plain_run(ragged))["change"] > 1e-2
    with pytest.raises(AssertionError):
        check(engine_run(ragged, prepare=plant_mean_of_means), plain_run(ragged), "64-true")


def count_syncs(stepper, windows, sync_always=False):
    """Count DDP's bucket reductions by micro-step."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    counts: list[int] = []

    def hook(state, bucket):
        counts[-1] += 1
        return allreduce_hook(state, bucket)

    stepper.module.register_comm_hook(None, hook)

    def before(is_last):
        counts.append(0)
        stepper.sync.sync.before(True if sync_always else is_last)

    stepper.sync.before = before
    return counts


def syncs_only_at_the_end(counts: list[int], micro_steps: int) -> bool:
    """Whether reductions happen in every last micro-step of a window, and in no other.

    In the first step not even there: it is reduced afterwards, to see whether all parameters are reached.
    """
    first, later = counts[:micro_steps], counts[micro_steps:]
    return sum(first) == 0 and all(
        (count > 0) == ((number + 1) % micro_steps == 0) for number, count in enumerate(later)
    )


def test_gradients_are_synchronised_on_the_last_micro_step_only(ranks):
    problem = Problem("mlp", 24, 8, 1)
    for answer in ranks(2).run(engine_run, problem, 2, count_syncs):
        assert len(answer["observed"]) == 3 * 4
        assert syncs_only_at_the_end(answer["observed"], micro_steps=4)


def test_a_branch_that_is_not_declared_stops_the_run_before_a_wrong_update(ranks):
    # The first step takes the branch on both ranks, the third does not; DDP would notice a step too late.
    problem = Problem("undeclared", 24, 8, 4, steps=12)
    with pytest.raises(AssertionError, match="set `conditional = True` in the model's class"):
        ranks(2).run(engine_run, problem, 2)


def test_a_planted_sync_on_every_micro_step_is_found(ranks):
    problem = Problem("mlp", 24, 8, 1)
    for answer in ranks(2).run(engine_run, problem, 2, partial(count_syncs, sync_always=True)):
        assert not syncs_only_at_the_end(answer["observed"], micro_steps=4)
        check(answer, plain_run(problem), "64-true")  # exact all the same: only the count can find it
