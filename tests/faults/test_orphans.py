"""Ranks end with what started them from their first statement on, and with each other before they have met."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.runs import LONGEST

IMPORTS = "import trainer, os, time; os.write(1, b'imports\\n'); time.sleep(60)"
"""A rank in the middle of its imports: torch comes after the package."""

LAUNCHES = """
import os, subprocess, sys, time
environment = os.environ | {"LOCAL_RANK": "1", "TRAINER_LAUNCHER": str(os.getpid())}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
print(rank.pid, flush=True)
time.sleep(60)
"""

WATCHES = """
import subprocess, sys, time
from trainer.faults.signals import end_start_watch, watch_start
from trainer.system.processes import ProcessId
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
started = []
watch_start(started, {})
started.append(child)  # as Fabric does, while it is watched
print(child.pid, flush=True)
time.sleep(60)
"""


def environment(**names):
    """This process's, of no launcher, with ``names``."""
    foreign = ("TORCHELASTIC", "TRAINER_", "LOCAL_RANK", "RANK", "GROUP_RANK", "MASTER_")
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)} | names


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(condition, seconds=30.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_rank_that_imports_ends_with_the_process_that_started_it():
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHES, IMPORTS], stdout=subprocess.PIPE, text=True, env=environment()
    )
    pid = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "imports\n"
    launcher.kill()
    launcher.wait()
    wait_until(lambda: is_gone(pid))


def started_rank(**names):
    return subprocess.run(
        [sys.executable, "-c", "import trainer; print('imports')"],
        env=environment(LOCAL_RANK="1", **names),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_rank_whose_launcher_ended_before_it_ran_ends_at_once():
    ended = subprocess.Popen(["true"])
    ended.wait()
    done = started_rank(TRAINER_LAUNCHER=str(ended.pid))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "trainer: error: what started this rank has ended\n"


def test_a_number_of_a_launcher_that_is_none_is_refused():
    done = started_rank(TRAINER_LAUNCHER="nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "trainer: error: TRAINER_LAUNCHER='nobody' is not the number of a process: unset it\n"


def test_a_rank_of_torchrun_whose_agent_and_store_are_gone_ends_at_once():
    with socket.create_server(("127.0.0.1", 0)) as store:
        names = {
            "TORCHELASTIC_RUN_ID": "a",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
        }
        assert started_rank(**names).stdout == "imports\n"
    assert started_rank(**names).returncode == 1
    nested = started_rank(**names, TRAINER_RANK_BOUND="1")  # started by a rank, with its variables
    assert (nested.returncode, nested.stdout) == (0, "imports\n")


def test_what_a_rank_starts_is_no_rank():
    code = "import trainer, os; print(os.environ.get('TRAINER_LAUNCHER'), os.environ['TRAINER_RANK_BOUND'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(LOCAL_RANK="1", TRAINER_LAUNCHER=str(os.getpid())),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "None 1\n"


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGKILL, "input()", "was killed by SIGKILL"), (None, "import sys; sys.exit(3)", "ended with exit code 3")],
)
def test_a_rank_that_ends_before_the_run_has_a_watch_ends_the_first_one(number, code, said):
    first = subprocess.Popen(
        [sys.executable, "-c", WATCHES, code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    pid = int(first.stdout.readline())
    if number is not None:
        os.kill(pid, number)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 1
    assert errors == f"trainer: error: rank 1 (pid {pid}) {said} before training: nothing is lost\n"


def test_a_rank_that_another_launcher_started_is_missed_before_training_too():
    code = """
import json, subprocess, sys, time
from trainer.faults import signals
from trainer.system.processes import ProcessId
signals.SECONDS_TO_FAIL = 0.5
other = json.loads(subprocess.run([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE).stdout)
signals.watch_start([], {1: ProcessId.from_dict(other)})
time.sleep(60)
"""
    other = "import json; from trainer.system.processes import ProcessId; print(json.dumps(ProcessId.own().to_dict()))"
    done = subprocess.run(
        [sys.executable, "-c", code, other],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    said = r"trainer: error: rank 1 \(pid \d+\) was killed or has failed before training: nothing is lost\n"
    assert re.fullmatch(said, done.stderr)


def is_rank(pid, number):
    try:
        return f"LOCAL_RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def second_rank(run):
    """Its number, as soon as it is there."""
    found = []
    wait_until(lambda: found.extend(pid for pid in run.pids() if is_rank(pid, 1)) or found, 240.0)
    return found[0]


def test_a_rank_killed_while_it_imports_ends_the_others(start):
    run = start("plain", 2)
    pid = second_rank(run)
    os.kill(pid, signal.SIGKILL)
    assert run.wait(LONGEST) == 1
    run.assert_nothing_left()
    assert run.errors() == [
        f"trainer: error: rank 1 (pid {pid}) was killed by SIGKILL before training: nothing is lost"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["plain", "torchrun"])
def test_the_launcher_is_killed_while_the_ranks_import_and_none_is_left(launcher, start):
    run = start(launcher, 2)
    second_rank(run)
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left()
