"""One run a directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress

import pytest
from helpers import LONG
from helpers.warm import forks

from trainer.errors import RecipeError
from trainer.system.lock import RunLock
from trainer.system.processes import boot_id


def hold(folder, answers):
    """Take the lock, say how that went, and keep it."""
    try:
        answers.put(RunLock(folder).acquire() or "held")
    except RecipeError as refusal:
        answers.put(str(refusal))
    time.sleep(600)


@pytest.fixture
def holds(tmp_path):
    """A function that has another process take the lock of ``tmp_path``: that process, and what it has to say."""
    started = []

    def begin():
        answers = forks.SimpleQueue()
        started.append(forks.Process(target=hold, args=(tmp_path, answers), daemon=True))
        started[-1].start()
        return started[-1], answers.get()

    yield begin
    for process in started:
        process.kill()
        process.join()


def write(folder, **owner):
    (folder / ".run.lock").write_text(json.dumps({"host": socket.gethostname(), "started": "2026-01-02", **owner}))


def test_a_lock_says_whose_it_is_and_leaves_nothing(tmp_path):
    lock = RunLock(tmp_path)
    for _ in range(2):
        assert lock.acquire() is None
        owner = json.loads((tmp_path / ".run.lock").read_text())
        assert (owner["host"], owner["pid"], owner["boot_id"]) == (socket.gethostname(), os.getpid(), boot_id())
        lock.release()
        assert list(tmp_path.iterdir()) == []


def test_a_second_run_is_refused_and_takes_over_when_the_first_is_killed(holds, tmp_path):
    holder, said = holds()
    assert said == "held"
    with pytest.raises(RecipeError, match=rf"in use by the run of pid {holder.pid} on {socket.gethostname()} since \d"):
        RunLock(tmp_path).acquire()
    assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == holder.pid
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    lock = RunLock(tmp_path)
    line = lock.acquire()
    assert f"pid {holder.pid}" in line
    assert "has died: taking over its lock" in line
    lock.release()


def test_neither_a_second_run_of_the_process_nor_a_forked_child_drops_the_lock(holds, tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    with pytest.raises(RecipeError, match="another run of this process"):
        RunLock(tmp_path / "." / "").acquire()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert f"in use by the run of pid {os.getpid()}" in holds()[1]
    lock.release()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"pid": 1, "boot_id": boot_id()}, "pid 1 "),  # a number that another process has now
        ({"pid": 4, "boot_id": "another"}, "pid 4 "),  # of this machine before it was started again
        ('{"host": "elsew', None),  # not written to its end
    ],
)
def test_a_lock_that_nobody_holds_is_taken_over(tmp_path, content, said):
    write(tmp_path, **content) if isinstance(content, dict) else (tmp_path / ".run.lock").write_text(content)
    lock = RunLock(tmp_path)
    line = lock.acquire()
    assert line is None if said is None else said in line
    lock.release()


def test_a_run_on_another_machine_is_not_ours_to_judge(tmp_path):
    write(tmp_path, pid=7, host="elsewhere", boot_id="another")
    refusal = r"pid 7 on elsewhere since 2026-01-02, another machine: .*remove .*run\.lock"
    with pytest.raises(RecipeError, match=refusal):
        RunLock(tmp_path).acquire()
    assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == 7


def compete(folder, begin, answers):
    begin.wait()
    won = 0
    while won < 10:
        lock = RunLock(folder)
        with suppress(RecipeError):
            lock.acquire()
            won += 1
            with open(folder / "inside", "x"):  # fails if another one is inside
                time.sleep(0.0005)
            (folder / "inside").unlink()
            lock.release()
    answers.put(won)


def test_of_those_that_race_exactly_one_wins_again_and_again(tmp_path):
    begin, answers = forks.Event(), forks.Queue()
    racers = [forks.Process(target=compete, args=(tmp_path, begin, answers), daemon=True) for _ in range(3)]
    for racer in racers:
        racer.start()
    begin.set()
    assert [answers.get(timeout=LONG) for _ in racers] == [10, 10, 10]
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0]


SLURM = {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "here", "SLURM_RESTART_COUNT": "1"}
NIGHT = {"TORCHELASTIC_RUN_ID": "night"}


@pytest.mark.parametrize(
    ("ours", "owner", "taken_over"),
    [
        (SLURM, {"slurm_job": "here:17", "slurm_restarts": 0}, True),
        (SLURM, {"slurm_job": "here:17", "slurm_restarts": 1}, False),  # another step of this very start
        (SLURM, {"slurm_job": "here:18", "slurm_restarts": 0}, False),
        (SLURM, {"slurm_job": "there:17", "slurm_restarts": 0}, False),
        (SLURM, {}, False),
        (NIGHT, {"rendezvous": "night"}, True),
        (NIGHT, {"rendezvous": "day"}, False),
        (NIGHT, {}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, {"rendezvous": "none"}, False),
    ],
)
def test_what_slurm_or_torchrun_starts_again_elsewhere_takes_its_own_lock_over(
    tmp_path, monkeypatch, ours, owner, taken_over
):
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    write(tmp_path, host="another", pid=4711, boot_id="another", **owner)
    lock = RunLock(tmp_path)
    if taken_over:
        assert "the run of pid 4711 on another since 2026-01-02 has died" in lock.acquire()
        lock.release()
    else:
        with pytest.raises(RecipeError, match="another machine"):
            lock.acquire()
