"""What run.deterministic keeps is predicted, though most of its micro-steps are left out of a trace."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
from helpers.tiny import target_of
from helpers.traced import own_recipe, traces

from trainer.data.loader import Loader
from trainer.engine.data_feed import make_windows
from trainer.errors import RecipeError
from trainer.fakegpu.events import Trace
from trainer.fakegpu.peaks import replay
from trainer.memory.plan import decide_plan
from trainer.planner.knobs import micro_batch_sizes
from trainer.planner.traced_run import draw_samples, max_partial_sums, trace_run
from trainer.recipe import Memory, Run


def trace(strategy: str, ranks: int, whole: bool) -> Trace:
    """Of a batch of 64 in 8 micro-batches for each rank: with all, or with those that a prediction traces."""
    memory = Memory(micro_batch_size=8 // ranks, strategy=strategy)
    asked = own_recipe(memory, run=Run(deterministic=True, evaluate=False))
    plan = decide_plan(asked, ranks)
    samples = draw_samples(asked, plan)
    assert samples.skipped == 6
    if whole:
        windows = make_windows(asked, Loader(asked.data.train, asked.data.collate), world_size=ranks, reduce=list)
        samples = dataclasses.replace(samples, first=next(iter(windows.epoch(0, 0, 1))), skipped=0)
    return trace_run(asked, plan, samples, target_of())


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_partial_sums_are_counted_as_if_every_micro_step_were_traced(strategy, ranks):
    found = traces({name: partial(trace, strategy, ranks, name == "whole") for name in ("whole", "traced")})
    peaks = {name: replay(one).peak_allocated for name, one in found.items()}
    assert peaks["traced"] == pytest.approx(peaks["whole"], rel=0.01)


def test_the_most_sums_that_are_kept_while_a_gradient_is_computed():
    for micro_steps in range(1, 200):
        assert max_partial_sums(micro_steps) == max(bin(done).count("1") for done in range(micro_steps))


def test_no_micro_batch_is_chosen_by_the_number_of_ranks():
    asked = own_recipe(Memory(micro_batch_size="auto"), run=Run(deterministic=True))
    assert micro_batch_sizes(asked, 2) == [None]
    with pytest.raises(RecipeError, match="to a number"):
        decide_plan(asked, 2)
