"""No race between streams and the host on a GPU, and no wait of the host that need not be: without a GPU.

A run is traced on the planner's GPU, which computes nothing; ``races/detector.py`` says what counts as a race. One
process imports everything and forks another for each run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest
import torch
from helpers.warm import forks
from packaging.version import Version
from races.configurations import OTHERS, USUAL, Watched, watch
from races.faults import UNORDERED, WAITING
from races.programs import PROGRAMS, verdicts

from trainer.system.child_jobs import run_in_child

Allowed = dict[tuple[str, str, str], tuple[float, str]]

SYNCS: Allowed = {
    ("forward", "trainer/engine/loss_totals.py", "read"): (1, "step"),  # losses and norm of the step before
    ("step", "trainer/engine/loss_totals.py", "read"): (1, "run"),  # those of the last step
    # weights of losses, compared in the first step
    ("forward", "trainer/engine/loss_check.py", "check_loss"): (4, "run"),
    ("backward", "trainer/memory/optimizer_offload.py", "wait"): (1, "step"),  # all gradients are in host memory
    ("backward", "trainer/engine/sync.py", "gradient_rank_counts"): (2, "step"),  # of DDP, in the first step
}
"""Where the host may wait for the device in a step: phase, file and function; how often a run, a step, a micro-step."""

READ_AT_ONCE = (
    "optimizer",
    "updated ahead",
    "parameters",
    "fp16",
    "deterministic",
    "8-bit",
    "stochastic",
    "batch norm",
)
"""In the names of configurations whose losses and norm are read before the update: see ``Stepper.can_read_late``."""

SYNCS_OF_OTHERS: Allowed = {
    ("forward", "transformers/masking_utils.py", "_ignore_bidirectional_mask_sdpa"): (1, "micro-step"),  # any padding?
    ("step", "fsdp/sharded_grad_scaler.py", "unscale_"): (2, "step"),  # of offloaded gradients: was there an overflow?
    ("step", "optim/subclass_8bit.py", "zeros"): (64, "run"),  # the state is made
    # In a fixed order FSDP brings the gradients of streamed parameters to the host itself.
    ("backward", "_fully_shard/_fsdp_param_group.py", "finalize_backward"): (64, "step"),
}
"""In libraries, by what only some of the slow configurations use."""

SYNCS_OF_OLD_FSDP: Allowed = {
    ("backward", "_fully_shard/_fsdp_param_group.py", "finalize_backward"): (64, "micro-step")
}
"""Before torch 2.13: of streamed parameters, one by one when backward is over; the first of them waits for all."""

SUPERFLUOUS = {
    # Copies on the stream that computes, or on the one other, are right, but not beside each other.
    ("with stream", "trainer/memory/activation_offload.py", "_copy_to_host"): 1,
    ("with stream", "trainer/memory/activation_offload.py", "_prefetch"): 1,
    ("with stream", "trainer/memory/optimizer_offload.py", "gradient_to_host"): 1,
    # From torch 2.15 on: backward ends on the stream of the computation, which waits for FSDP's.
    ("record_stream", "trainer/memory/optimizer.py", "_record_norm"): 1,
}
"""How many orders of a kind may be forgotten in a function without harm."""

SLOW_ORDERS = [pytest.param(order, marks=pytest.mark.slow) for order in ("wait_stream", "with stream")]
ORDERS = ["wait_event", "synchronize", "join", "pin_memory", "record_stream", *SLOW_ORDERS]
BEFORE_TRAINING = ("init", "saving")
MOST_TRIED = 3
"""Configurations, the smallest first, in which a forgotten order may show."""

Seen = Callable[[str], Watched]


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """One that has imported everything, and never trained: it can fork (see trainer/system/child_jobs.py)."""
    with ProcessPoolExecutor(1, forks) as pool:
        yield pool


@pytest.fixture(scope="module")
def seen(process) -> Seen:
    """What is seen in a configuration as it is."""
    return cache(lambda name: process.submit(watch, name).result())


def waits(watched: Watched, allowed: Allowed = SYNCS) -> list[str]:
    """Where the host waited for the device in steps, though it is not allowed to."""
    windows, micro_steps, abandoned = (watched.entered.get(name, 0) for name in ("window", "forward", "abandoned"))
    often = {"run": 1 + abandoned, "step": windows + abandoned, "micro-step": micro_steps}
    times: Counter[tuple[str, str, str]] = Counter()
    lines: dict[tuple[str, str, str], list[str]] = {}
    for phase, what, file, function, line, count in watched.syncs:
        times[phase, file, function] += count
        lines.setdefault((phase, file, function), []).append(f"{file}:{line} ({function}): {what}")
    found = []
    for place, count in times.items():
        most, unit = allowed.get(place, (0, "run"))
        if place[0] not in BEFORE_TRAINING and count > most * often[unit]:
            found.append(f"the host waits for the device {count} times in {place[0]} at {', '.join(lines[place])}")
    return found


def check(name: str, watched: Watched) -> None:
    """Nothing is wrong in a configuration."""
    assert watched.operations
    allowed = SYNCS | (SYNCS_OF_OTHERS if name in OTHERS else {})
    if any(part in name for part in READ_AT_ONCE):
        allowed |= {("step", "trainer/engine/loss_totals.py", "read"): (1, "step")}
    if Version(torch.__version__) < Version("2.13") and "parameters" in name:
        allowed |= SYNCS_OF_OLD_FSDP
    wrong = [*watched.findings, *waits(watched, allowed)]
    assert not wrong, "\n".join(wrong)


def test_the_rules(process):
    found = process.submit(run_in_child, verdicts).result()
    assert found == {program.__name__: [wanted] * bool(wanted) for program, wanted in PROGRAMS.items()}


@pytest.mark.first(2)
@pytest.mark.parametrize("name", [*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_nothing_races_and_nobody_waits(name, seen):
    check(name, seen(name))


@pytest.mark.slow
def test_every_wait_that_is_allowed_occurs(seen):
    occurs = {(phase, file, function) for name in USUAL for phase, _, file, function, *_ in seen(name).syncs}
    assert not SYNCS.keys() - occurs


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_can_be_forgotten(order, seen, process):
    """Each that our code gives is needed in some configuration, or is among ``SUPERFLUOUS``."""
    shown_in: dict[str, list[str]] = {}
    for name in USUAL:
        for kind, place in seen(name).orders:
            if kind == order:
                shown_in.setdefault(place, []).append(name)
    assert shown_in
    unnoticed: dict[tuple[str, str, str], list[str]] = {}
    for place, names in shown_in.items():
        runs = (process.submit(watch, name, None, (order, place)).result() for name in names[:MOST_TRIED])
        if not any(run.findings for run in runs):
            file, function = re.match(r"(.*):\d+ \((.*)\)", place).groups()  # type: ignore[union-attr]
            unnoticed.setdefault((order, file, function), []).append(place)
    missed = [places for key, places in unnoticed.items() if len(places) > SUPERFLUOUS.get(key, 0)]
    assert not missed, f"{order} could be missing without anybody seeing it: {missed}"


@pytest.mark.first(1)
@pytest.mark.parametrize("plant", [*UNORDERED, *WAITING], ids=lambda plant: plant.__name__)
def test_a_planted_race_or_wait_is_found(plant, process):
    name, kind = (UNORDERED | WAITING)[plant]
    watched = process.submit(watch, name, plant).result()
    assert watched.met, "the fault has met nothing: what it replaces is not called any more"
    if plant in UNORDERED:
        assert any(finding.startswith(kind) for finding in watched.findings)
    else:
        assert any(f" in {kind} at " in wait and "races/faults.py" in wait for wait in waits(watched))
