"""A rank that raises, is killed, is stopped or hangs ends the whole run, with the cause in the first lines."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from trainer.errors import EXIT_REQUEUE

STEP = r"step 3, forward, samples \d+, \d+, \d+, \d+"
AT = r"at step 3 in forward \(samples \d+, \d+, \d+, \d+\)"
CAUSES = {
    "raise": r"ZeroDivisionError: division by zero$",
    "exit": r"SystemExit: sys.exit\(0\) was called before the run was finished$",
    "run error": "this rank has had enough$",
    "no memory": "out of memory in forward on rank 1; ",
}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def disturb(start, launcher, ranks, rank, what, *flags):
    """Start a run that ``rank`` disturbs in its third step; return it when it has ended."""
    run = start(launcher, ranks, "--model.what", what, "--model.rank", str(rank), "--run.recover", "false", *flags)
    run.wait_for()
    assert run.wait() == 1
    run.assert_nothing_left()
    return run


def test_one_rank_names_step_phase_samples_and_cause_then_the_traceback(start):
    run = disturb(start, "plain", 1, 0, "raise")
    assert re.fullmatch(rf"trainer: error: rank 0, {STEP}: ZeroDivisionError: division by zero", run.errors()[0])
    assert "in disturb" in run.text.split("trainer: error")[1]
    assert run.text.count("Traceback") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks", "rank", "what"),
    [
        ("forks", 2, 1, "raise"),
        slow("plain", 2, 1, "raise"),
        slow("torchrun", 2, 0, "raise"),
        slow("forks", 2, 1, "exit"),
        slow("forks", 2, 1, "run error"),
        slow("forks", 2, 1, "no memory"),
    ],
)
def test_an_error_on_one_rank_is_everybodys_first_line(launcher, ranks, rank, what, start):
    run = disturb(start, launcher, ranks, rank, what)
    first, *others = run.errors()
    explains_itself = what in ("run error", "no memory")
    place = "" if explains_itself else f"rank {rank}, {STEP}: "
    assert re.search(f"trainer: error: {place}{CAUSES[what]}", first)
    assert len(others) == ranks - 1
    assert all(re.search(f"error: rank {rank} ended {AT}: {CAUSES[what]}", other) for other in others)
    assert ("in disturb" in run.text) != explains_itself
    assert "Connection closed by peer" not in run.text
    assert "SIGTERM received" not in run.text
    assert not (explains_itself and "Traceback" in run.text)


NAMED = {
    "kill": rf"error: rank RANK \(pid \d+ on \S+\) was killed or crashed: it was last {AT}$",
    "stop": rf"rank RANK \(pid \d+ on \S+\) is stopped by a signal, for \d+ s now: .*{AT}$",
    "hang": rf"error: rank RANK, {STEP}: no progress for \d+ s$",
}


# Where Fabric starts the ranks, the kernel ends them with the first one: nobody is left to say so.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "launcher", "ranks", "rank"),
    [
        ("kill", "forks", 2, 1),
        *(slow("kill", launcher, 2, 1) for launcher in ("plain", "torchrun")),
        *(slow("stop", *where) for where in (("forks", 2, 1), ("torchrun", 2, 0))),
        *(slow("hang", *where) for where in (("plain", 1, 0), ("forks", 2, 1))),
    ],
)
def test_a_rank_that_is_killed_stopped_or_hangs_is_named_with_its_last_step(what, launcher, ranks, rank, start):
    run = disturb(start, launcher, ranks, rank, what, *(["--run.hang_after", "4"] if what == "hang" else []))
    lines = run.errors() if what == "hang" else run.errors()[:1]  # of a hung rank the others quote it
    assert [line for line in lines if not re.search(NAMED[what].replace("RANK", str(rank)), line)] == []
    assert lines
    assert what != "hang" or "time.sleep(1000)" in run.text


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_data_is_named_with_the_samples(start):
    run = start("forks", 2, "--data.waits", "true", "--run.hang_after", "4")
    assert run.wait() == 1
    for line in run.errors():
        assert re.search(r"error: rank 1, step 3, loading, samples \d+, \d+, \d+, \d+: no progress for \d+ s$", line)
    assert "time.sleep(1000)" in run.text
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks", "flags"), [("plain", 2, []), ("torchrun", 3, ["--data.workers", "1"])])
def test_when_what_started_the_ranks_is_killed_none_is_left(launcher, ranks, flags, start):
    run = start(launcher, 2, *flags)
    run.wait_for()
    assert len(run.pids()) >= ranks
    if launcher == "plain":  # else the launcher hosts the store
        run.assert_on_loopback()
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    run.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "ranks"), [("forks", 2), slow("plain", 2), slow("torchrun", 2)])
def test_ctrl_c_twice_leaves_no_process_and_no_traceback_of_a_worker(launcher, ranks, start):
    run = start(launcher, ranks, "--data.workers", "1")
    run.wait_for()
    for _ in range(2):
        for process in run.processes:
            with suppress(ProcessLookupError):  # the first one may have ended it by now
                os.killpg(process.pid, signal.SIGINT)
        run.until(lambda: "SIGINT received" in run.text or run.process.poll() is not None, 60.0)
    assert run.wait() != 0
    run.assert_nothing_left()
    assert "DataLoader worker" not in run.text
    if launcher != "torchrun":  # whose agent shows one of its own
        assert "Traceback" not in run.text


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("launcher", "ranks", "rank", "name"),
    [("plain", 1, 0, "SIGINT"), ("forks", 2, 1, "SIGTERM"), slow("plain", 2, 1, "SIGTERM")],
)
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint_and_the_code_that_says_so(launcher, ranks, rank, name, start):
    run = start(launcher, ranks, "--data.workers", "1")
    run.wait_for()
    started_by_fabric = launcher == "plain" and rank > 0
    os.kill(rank_of(run, rank) if started_by_fabric else run.processes[rank].pid, getattr(signal, name))
    assert run.wait() == EXIT_REQUEUE
    run.assert_nothing_left()
    assert "Traceback" not in run.text
    step = int(re.search(r"stopped by .* after step (\d+); everything is saved", run.text)[1])
    (checkpoint,) = (run.output.parent / "run" / "checkpoints").iterdir()
    assert checkpoint.name.endswith(str(step))


def rank_of(run, rank):
    wanted = f"LOCAL_RANK={rank}\0".encode()
    return min(pid for pid in run.pids() if wanted in Path(f"/proc/{pid}/environ").read_bytes())  # and its workers


@pytest.mark.slow
def test_torchrun_passes_the_signal_on_and_waits_for_the_checkpoint(start):
    run = start("torchrun", 2, "--data.workers", "1")
    run.wait_for()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() != 0
    run.assert_nothing_left()
    assert "everything is saved" in run.text
    assert "DataLoader worker" not in run.text
    assert len(list((run.output.parent / "run" / "checkpoints").iterdir())) == 1
