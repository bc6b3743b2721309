"""A rank that raises, is killed, is stopped or hangs ends the whole run, with the cause in the first lines."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress

import pytest
from faults.runs import LONGEST

STEP = r"step 3, forward, samples \d+, \d+, \d+, \d+"
AT = r"at step 3 in forward \(samples \d+, \d+, \d+, \d+\)"
STEPS_ARE_TAKEN = "step 1/2000"
RANKS = [("plain", 2, 1)]
SLOW = [("plain", 2, 0), ("torchrun", 3, 2)]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


def disturb(start, launcher, ranks, rank, what, *flags):
    """Start a run that ``rank`` disturbs in its third step; return it when it has ended."""
    run = start(launcher, ranks, "--model.what", what, "--model.rank", str(rank), *flags)
    run.wait_for(STEPS_ARE_TAKEN)
    assert run.wait(LONGEST) == 1
    run.assert_nothing_left()
    return run


def test_one_rank_names_step_phase_samples_and_cause_then_the_traceback(start):
    run = disturb(start, "plain", 1, 0, "raise")
    assert re.fullmatch(rf"trainer: error: rank 0, {STEP}: ZeroDivisionError: division by zero", run.errors()[0])
    assert "in disturb" in run.text.split("trainer: error")[1]
    assert run.text.count("Traceback") == 1


@pytest.mark.parametrize(("launcher", "ranks", "rank"), [*RANKS, *SLOW])
def test_an_error_on_one_rank_is_everybodys_first_line(launcher, ranks, rank, start):
    run = disturb(start, launcher, ranks, rank, "raise")
    first, *others = run.errors()
    assert re.search(rf"trainer: error: rank {rank}, {STEP}: ZeroDivisionError: division by zero$", first)
    assert len(others) == ranks - 1
    assert all(re.search(rf"error: rank {rank} ended {AT}: ZeroDivisionError: division by zero$", o) for o in others)
    assert "in disturb" in run.text
    assert "Connection closed by peer" not in run.text
    assert "SIGTERM received" not in run.text


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks", "rank"), [("plain", 2, 1), ("torchrun", 2, 0)])
def test_sys_exit_on_one_rank_is_everybodys_failure(launcher, ranks, rank, start):
    run = disturb(start, launcher, ranks, rank, "exit")
    called = r"SystemExit: sys.exit\(0\) was called, by which nothing is finished$"
    first, *others = run.errors()
    assert re.search(rf"trainer: error: rank {rank}, {STEP}: {called}", first)
    assert len(others) == ranks - 1
    assert all(re.search(rf"error: rank {rank} ended {AT}: {called}", other) for other in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "own", "told"),
    [
        ("run error", "this rank has had enough", rf"rank 1 ended {AT}: this rank has had enough"),
        (
            "no memory",
            "out of memory in forward on rank 1; ",
            rf"rank 1 ended {AT}: out of memory in forward on rank 1; ",
        ),
    ],
)
def test_an_error_that_explains_itself_has_no_traceback(what, own, told, start):
    run = disturb(start, "plain", 2, 1, what, "--run.recover", "false")
    first, second = run.errors()
    assert first.startswith(f"[rank 1] trainer: error: {own}")
    assert re.match(f"trainer: error: {told}", second)
    assert "Traceback" not in run.text


# Where Fabric starts the ranks, the kernel ends them with the first one: nobody is left to say so.
@pytest.mark.parametrize(("launcher", "ranks", "rank"), [*RANKS, SLOW[1]])
def test_a_killed_rank_is_named_with_its_last_step(launcher, ranks, rank, start):
    run = disturb(start, launcher, ranks, rank, "kill")
    assert re.search(
        rf"error: rank {rank} \(pid \d+ on \S+\) was killed or crashed: it was last {AT}$", run.errors()[0]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks", "rank"), [("plain", 2, 1), ("torchrun", 2, 0)])
def test_a_stopped_rank_is_named_and_killed(launcher, ranks, rank, start):
    run = disturb(start, launcher, ranks, rank, "stop")
    assert re.search(rf"rank {rank} \(pid \d+ on \S+\) is stopped by a signal, for \d+ s now: .*{AT}$", run.errors()[0])


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks", "rank"), [("plain", 1, 0), ("torchrun", 2, 1)])
def test_a_hung_rank_is_named_with_its_stack(launcher, ranks, rank, start):
    run = disturb(start, launcher, ranks, rank, "hang", "--run.hang_after", "4")
    for line in run.errors():  # the others quote it
        assert re.search(rf"error: rank {rank}, {STEP}: no progress for \d+ s$", line)
    assert "time.sleep(1000)" in run.text


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_data_is_named_with_the_samples(start):
    run = start("torchrun", 2, "--data.waits", "true", "--run.hang_after", "4")
    assert run.wait(120) == 1
    for line in run.errors():
        assert re.search(r"error: rank 1, step 3, loading, samples \d+, \d+, \d+, \d+: no progress for \d+ s$", line)
    assert "time.sleep(1000)" in run.text
    run.assert_nothing_left()


def test_the_first_process_is_killed_and_no_rank_is_left(start):
    run = start("plain", 2)
    run.wait_for(STEPS_ARE_TAKEN)
    assert len(run.pids()) >= 2
    run.process.kill()
    assert run.wait(10) == -signal.SIGKILL
    run.assert_nothing_left()


@pytest.mark.slow
def test_the_agent_of_torchrun_is_killed_and_no_rank_is_left(start):
    run = start("torchrun", 2, "--data.workers", "1")
    run.wait_for(STEPS_ARE_TAKEN)
    assert len(run.pids()) >= 3
    run.process.kill()
    run.wait(10)
    run.assert_nothing_left()


@pytest.mark.parametrize("launcher", ["plain", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_ctrl_c_twice_leaves_no_process_and_no_traceback_of_a_worker(launcher, start):
    run = start(launcher, 2, "--data.workers", "1")
    run.wait_for(STEPS_ARE_TAKEN)
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(1.0)
    with suppress(ProcessLookupError):  # the first one may have ended it by now
        os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(LONGEST) != 0
    run.assert_nothing_left()
    assert "DataLoader worker" not in run.text
    if launcher == "plain":  # torchrun's agent shows one of its own
        assert "Traceback" not in run.text
