"""The promise: however a batch is cut and on however many ranks, the same weights as one process with whole batches."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch
from helpers.problems import OBJECTIVES, OF_IMAGES, Problem, engine_run, errors, plain_run
from helpers.rounding import ROUNDING
from hypothesis import example, given, settings
from hypothesis import strategies as st

# Relative tolerances of weights, their change over three steps, losses and gradient norms. The weights change by a
# hundredth or more, and gradients are sums of terms that cancel to a hundredth or more.
TOLERANCE = {
    "64-true": {"weights": ROUNDING, "change": 100 * ROUNDING, "losses": ROUNDING, "norms": 100 * ROUNDING},
    "32-true": {"weights": 1e-6, "change": 1e-4, "losses": 1e-6, "norms": 1e-4},
}
MODELS = ["vit", "distilbert", "bigbird", "mlp", *OF_IMAGES]
CUTS = [1, 2, 7, 1000]
# Three steps each: of full batches; with a last batch of 3 samples; with a last batch of 1, fewer than 2 or 3 ranks.
BATCHES = {"even": (24, 8), "ragged": (19, 8), "fewer than ranks": (17, 8)}


def check(ours: dict, plain: dict, precision: str) -> None:
    if not all(map(math.isfinite, plain["losses"])):  # a batch without a single label: its mean is 0 / 0
        assert any(ours["skipped"])
        return
    found = errors(ours, plain)
    assert {key: error for key, error in found.items() if not error <= TOLERANCE[precision][key]} == {}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_on_one_rank_equals_the_plain_loop(name, batch):
    for precision, cuts in (("64-true", CUTS), ("32-true", CUTS[:1])):
        for cut in cuts:
            problem = Problem(name, *BATCHES[batch], micro_batch_size=cut, precision=precision)
            check(engine_run(problem), plain_run(problem), precision)


# Of some models the most uneven batches on 2 ranks; of one of them all batches. The rest is slow.
USUAL = [
    *((name, "fewer than ranks", 2) for name in ("mlp", "vit", "distilbert")),
    ("mlp", "even", 2),
    ("mlp", "ragged", 2),
]
ON_RANKS = [
    pytest.param(*case, marks=() if case in USUAL else pytest.mark.slow) for case in product(MODELS, BATCHES, (2, 3))
]


@pytest.mark.parametrize(("name", "batch", "world_size"), ON_RANKS)
def test_every_cut_on_several_ranks_equals_the_plain_loop(name, batch, world_size, ranks):
    for precision, cuts in (("64-true", CUTS), ("32-true", CUTS[:1])):
        for cut in cuts:
            problem = Problem(name, *BATCHES[batch], micro_batch_size=cut, precision=precision)
            plain, answers = plain_run(problem), ranks(world_size).run(engine_run, problem, world_size)
            for answer in answers:
                check(answer, plain, precision)
            assert all(torch.equal(answer["after"], answers[0]["after"]) for answer in answers)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_task_and_loss_equals_torchs_mean_over_the_whole_batch(name, ranks):
    for cut in (2, 1000):
        problem = Problem(name, *BATCHES["fewer than ranks"], micro_batch_size=cut, clip_norm=0.05)
        check(engine_run(problem), plain_run(problem), "64-true")
    plain = plain_run(problem := Problem(name, *BATCHES["ragged"], micro_batch_size=2))
    for answer in ranks(2).run(engine_run, problem, 2):
        check(answer, plain, "64-true")


problems = st.builds(
    Problem,
    name=st.sampled_from([*MODELS, "tagger", "two_losses", "unused", "branch", *OBJECTIVES]),
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
@example(Problem("mlp", 24, 8, 3, clip_norm=0.05))
def test_drawn_cuts_on_one_rank(problem):
    check(engine_run(problem), plain_run(problem), "64-true")


@settings(max_examples=15)
@given(problem=problems)
@example(problem=Problem("tagger", 13, 13, 4))
@example(problem=Problem("two_losses", 13, 5, 2))
@example(problem=Problem("mlp", 24, 8, 3, clip_norm=0.05))
@example(problem=Problem("branch", 13, 5, 2))
@example(problem=Problem("unused", 13, 5, 2))
def test_drawn_cuts_on_two_ranks(problem, ranks):
    plain = plain_run(problem)
    for answer in ranks(2).run(engine_run, problem, 2):
        check(answer, plain, "64-true")


# ----------------------------------------------------------------------------------------------------------------------
# Checks of the checks: a planted fault must be found.


def plant_mean_of_means(stepper, windows):
    """What gradient accumulation usually does: every micro-batch's mean counts alike."""
    whole, honest = windows.epoch, stepper.precision.backward

    def epoch(*args, **kwargs):
        for window in whole(*args, **kwargs):
            weights = iter([sum(windows.weigh(micro.batch).values()) for micro in window])

            def backward(tensor, module, *scale, window=window, weights=weights):
                share = next(weights) * len(window) / window.weights["loss"]
                honest(tensor / share, module, *scale)

            stepper.precision.backward = backward
            yield window

    windows.epoch = epoch


def test_a_planted_mean_of_means_is_found():
    even = Problem("mlp", 24, 8, 2)
    check(engine_run(even, prepare=plant_mean_of_means), plain_run(even), "64-true")  # there it is exact
    ragged = Problem("mlp", 15, 5, 2)
    assert errors(engine_run(ragged, prepare=plant_mean_of_means), plain_run(ragged))["change"] > 1e-2


def count_syncs(stepper, windows, sync_always=False):
    """Count DDP's bucket reductions by micro-step."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    counts: list[int] = []

    def hook(state, bucket):
        counts[-1] += 1
        return allreduce_hook(state, bucket)

    stepper.module.register_comm_hook(None, hook)

    honest = stepper.sync.before_forward

    def before(is_last):
        counts.append(0)
        honest(True if sync_always else is_last)

    stepper.sync.before_forward = before
    return counts


def syncs_only_at_the_end(counts: list[int], micro_steps: int) -> bool:
    """Whether reductions happen in every last micro-step of a window, and in no other.

    In the first step not even there: it is reduced afterwards, to see whether all parameters are reached.
    """
    first, later = counts[:micro_steps], counts[micro_steps:]
    return sum(first) == 0 and all(
        (count > 0) == ((number + 1) % micro_steps == 0) for number, count in enumerate(later)
    )


@pytest.mark.parametrize("sync_always", [False, True], ids=["as it is", "with a planted sync on every micro-step"])
def test_gradients_are_synchronised_on_the_last_micro_step_only(sync_always, ranks):
    problem = Problem("mlp", 24, 8, 1)
    for answer in ranks(2).run(engine_run, problem, 2, partial(count_syncs, sync_always=sync_always)):
        assert len(answer["observed"]) == 3 * 4
        assert syncs_only_at_the_end(answer["observed"], micro_steps=4) != sync_always
        check(answer, plain_run(problem), "64-true")  # exact all the same: only the count can find it


def test_a_branch_that_is_not_declared_stops_the_run_before_a_wrong_update(ranks):
    # The first step takes the branch on both ranks, the third does not; DDP would notice a step too late.
    problem = Problem("undeclared", 24, 8, 4, steps=12)
    with pytest.raises(AssertionError, match="set `conditional = True` in the model class"):
        ranks(2).run(engine_run, problem, 2)
