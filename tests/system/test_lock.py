"""One run a directory."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from trainer.errors import RecipeError
from trainer.system.lock import RunLock
from trainer.system.processes import boot_id

HOLD = """
import sys, time
from pathlib import Path
from trainer.system.lock import RunLock
line = RunLock(Path(sys.argv[1])).acquire()
print(line or "held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of ``tmp_path``."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def write(folder, **owner):
    (folder / ".run.lock").write_text(json.dumps({"host": socket.gethostname(), "started": "2026-01-02", **owner}))


def test_a_lock_says_whose_it_is_and_leaves_nothing(tmp_path):
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    owner = json.loads((tmp_path / ".run.lock").read_text())
    assert (owner["host"], owner["pid"], owner["boot_id"]) == (socket.gethostname(), os.getpid(), boot_id())
    lock.release()
    assert list(tmp_path.iterdir()) == []
    assert lock.acquire() is None
    lock.release()


def test_a_second_run_is_refused(holder, tmp_path):
    with pytest.raises(RecipeError, match=rf"in use by the run of pid {holder.pid} on {socket.gethostname()} since \d"):
        RunLock(tmp_path).acquire()
    assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == holder.pid


def test_a_second_run_of_the_same_process_is_refused_and_does_not_drop_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    with pytest.raises(RecipeError, match="another run of this process"):
        RunLock(tmp_path / "." / "").acquire()
    other = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert f"in use by the run of pid {os.getpid()}" in other.stderr
    lock.release()


def test_the_lock_of_a_killed_run_is_taken_over(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = RunLock(tmp_path)
    line = lock.acquire()
    assert f"pid {holder.pid}" in line
    assert "has died: its lock is taken over" in line
    lock.release()


def test_a_number_that_another_process_has_now_does_not_matter(tmp_path):
    write(tmp_path, pid=1, boot_id=boot_id())
    lock = RunLock(tmp_path)
    assert "pid 1 " in lock.acquire()
    lock.release()


def test_the_lock_of_this_machine_before_it_was_started_again_is_taken_over(tmp_path):
    write(tmp_path, pid=4, boot_id="another")
    lock = RunLock(tmp_path)
    assert "pid 4 " in lock.acquire()
    lock.release()


def test_a_run_on_another_machine_is_not_ours_to_judge(tmp_path):
    write(tmp_path, pid=7, host="elsewhere", boot_id="another")
    with pytest.raises(
        RecipeError, match=r"pid 7 on elsewhere since 2026-01-02, another machine: .*remove .*run\.lock"
    ):
        RunLock(tmp_path).acquire()
    assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == 7


def test_a_lock_that_was_not_written_to_its_end_is_free(tmp_path):
    (tmp_path / ".run.lock").write_text('{"host": "elsew')
    lock = RunLock(tmp_path)
    assert lock.acquire() is None
    lock.release()


def compete(folder, begin, answers):
    time.sleep(max(0.0, begin - time.time()))
    won, until = 0, time.monotonic() + 50
    while won < 10 and time.monotonic() < until:
        lock = RunLock(folder)
        try:
            lock.acquire()
        except RecipeError:
            continue
        won += 1
        with open(folder / "inside", "x"):  # fails if another one is inside
            time.sleep(0.0005)
        (folder / "inside").unlink()
        lock.release()
    answers.put(won)


def test_of_two_that_race_exactly_one_wins_again_and_again(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    begin = time.time() + 0.2
    racers = [context.Process(target=compete, args=(tmp_path, begin, answers)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert [answers.get() for _ in racers] == [10, 10, 10]


def test_a_forked_child_neither_holds_the_lock_nor_drops_it(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    child = multiprocessing.get_context("fork").Process(target=str)
    child.start()
    child.join()
    other = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "in use by" in other.stderr
    lock.release()


@pytest.mark.parametrize(
    ("owner", "taken_over"),
    [
        ({"slurm_job": "here:17", "slurm_restarts": 0}, True),
        ({"slurm_job": "here:17", "slurm_restarts": 1}, False),  # another step of this very start
        ({"slurm_job": "here:18", "slurm_restarts": 0}, False),
        ({"slurm_job": "there:17", "slurm_restarts": 0}, False),
        ({}, False),
    ],
)
def test_a_job_that_slurm_starts_again_elsewhere_takes_its_own_lock_over(tmp_path, monkeypatch, owner, taken_over):
    for name, value in {"JOB_ID": "17", "CLUSTER_NAME": "here", "RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    write(tmp_path, host="another", pid=4711, boot_id="another", **owner)
    take_or_be_refused(tmp_path, taken_over)


@pytest.mark.parametrize(
    ("ours", "theirs", "taken_over"),
    [("night", "night", True), ("night", "day", False), ("none", "none", False), ("night", None, False)],
)
def test_ranks_that_torchrun_starts_again_on_another_machine_take_their_own_lock_over(
    tmp_path, monkeypatch, ours, theirs, taken_over
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", ours)
    write(tmp_path, host="another", pid=4711, boot_id="another", **({"rendezvous": theirs} if theirs else {}))
    take_or_be_refused(tmp_path, taken_over)


def take_or_be_refused(folder, taken_over):
    lock = RunLock(folder)
    if not taken_over:
        with pytest.raises(RecipeError, match="another machine"):
            lock.acquire()
        return
    assert "the run of pid 4711 on another since 2026-01-02 has died" in lock.acquire()
    lock.release()
