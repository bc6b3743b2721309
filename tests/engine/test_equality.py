"""The promise: however a batch is cut and on however many ranks, the same weights as one process with whole batches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
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
MODELS = ["vit", "distilbert", "mlp", "bigbird", *OF_IMAGES]
CUTS = [1, 2, 7, 1000]
# Three steps each: of full batches; with a last batch of 3 samples; with a last batch of 1, fewer than 2 or 3 ranks.
BATCHES = {"even": (24, 8), "ragged": (19, 8), "fewer than ranks": (17, 8)}


def check(ours: dict, plain: dict, precision: str) -> None:
    if not all(map(math.isfinite, plain["losses"])):  # a batch without a single label: its mean is 0 / 0
        assert any(ours["skipped"])
        return
    found = errors(ours, plain)
    assert {key: error for key, error in found.items() if not error <= TOLERANCE[precision][key]} == {}


@cache
def plain(name: str, batch: str, precision: str) -> dict:
    return plain_run(Problem(name, *BATCHES[batch], micro_batch_size=1, precision=precision))


def compare(name: str, batch: str, cut: int, world_size: int, ranks) -> None:
    """In double precision; with micro-batches of one sample in single precision, too."""
    for precision in TOLERANCE if cut == 1 else ("64-true",):
        problem = Problem(name, *BATCHES[batch], micro_batch_size=cut, precision=precision)
        run = partial(engine_run, problem, world_size)
        answers = [run()] if world_size == 1 else ranks(world_size).run(run)
        for answer in answers:
            check(answer, plain(name, batch, precision), precision)
        assert all(torch.equal(answer["after"], answers[0]["after"]) for answer in answers)


@pytest.mark.first(1)
@pytest.mark.parametrize(("name", "world_size"), [*product(MODELS, (1,)), *product(MODELS[:3], (2,))])
def test_any_cut_equals_the_plain_loop(name, world_size, ranks):
    """Any two of model, batch and cut meet; ``-m slow`` has every combination."""
    for number, cut in enumerate(CUTS, start=MODELS.index(name)):
        compare(name, [*BATCHES][number % len(BATCHES)], cut, world_size, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_every_cut_equals_the_plain_loop(name, batch, world_size, ranks):
    for cut in CUTS:
        compare(name, batch, cut, world_size, ranks)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_task_and_loss_equals_torchs_mean_over_the_whole_batch(name, ranks):
    clipped = Problem(name, *BATCHES["fewer than ranks"], micro_batch_size=2, clip_norm=0.05)
    wanted = plain_run(clipped)
    for cut in (2, 1000):
        check(engine_run(replace(clipped, micro_batch_size=cut)), wanted, "64-true")
    for answer in ranks(2).run(engine_run, Problem(name, *BATCHES["ragged"], micro_batch_size=2), 2):
        check(answer, plain(name, "ragged", "64-true"), "64-true")


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


def check_on_one_and_two_ranks(problem, ranks):
    wanted = plain_run(problem)
    for answer in (engine_run(problem), *ranks(2).run(engine_run, problem, 2)):
        check(answer, wanted, "64-true")


@pytest.mark.slow
@settings(max_examples=15)
@given(problem=problems)
@example(problem=Problem("tagger", 13, 13, 4))
@example(problem=Problem("two_losses", 13, 5, 2))
@example(problem=Problem("mlp", 24, 8, 3, clip_norm=0.05))
@example(problem=Problem("branch", 13, 5, 2))
@example(problem=Problem("unused", 13, 5, 2))
def test_drawn_cuts(problem, ranks):
    check_on_one_and_two_ranks(problem, ranks)


@pytest.mark.slow
@settings(max_examples=60)
@given(problem=problems)
def test_more_drawn_cuts(problem, ranks):
    check_on_one_and_two_ranks(problem, ranks)


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
