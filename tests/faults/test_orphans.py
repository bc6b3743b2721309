"""Ranks end with what started them from their first statement on, and with each other before they have met."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import LONG, has_ended, wait_until
from helpers.started import FOREIGN

IMPORTS = "import trainer, os, time; os.write(1, b'imports\\n'); time.sleep(600)"
"""A rank in the middle of its imports: torch comes after the package."""

LAUNCHES = """
import os, subprocess, sys, time
environment = os.environ | {"LOCAL_RANK": "1", "TRAINER_LAUNCHER": str(os.getpid())}
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment)
print(rank.pid, flush=True)
time.sleep(600)
"""

WATCHES = """
import subprocess, sys, time
from trainer.faults import signals
signals.FAIL_TIMEOUT = 0.5
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
started = []
signals.begin_startup_watch(started)
started.append(child)  # as Fabric does, while it is watched
print(child.pid, flush=True)
time.sleep(600)
"""


def started(code, *words, **names):
    """A process that does ``code``, with the variables ``names`` and none of another launcher."""
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith((*FOREIGN, "GROUP_RANK", "TRAINER_"))
    }
    command, pipe = [sys.executable, "-c", code, *words], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=clean | names)


def done(process):
    """Its exit code, and what it has printed."""
    out, err = process.communicate(timeout=LONG)
    return process.returncode, out, err


def test_a_rank_that_imports_ends_with_the_process_that_started_it():
    launcher = started(LAUNCHES, IMPORTS)
    pid = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "imports\n"
    launcher.kill()
    launcher.wait()
    wait_until(lambda: has_ended(pid))


def rank(**names):
    return done(started("import trainer; print('imports')", LOCAL_RANK="1", **names))


def test_a_rank_whose_launcher_has_ended_or_has_no_number_ends_at_once():
    ended = subprocess.Popen(["true"])
    ended.wait()
    said = "trainer: error: the process that started this rank has ended\n"
    assert rank(TRAINER_LAUNCHER=str(ended.pid)) == (1, "", said)
    said = "trainer: error: TRAINER_LAUNCHER='nobody' is not a process ID: unset it\n"
    assert rank(TRAINER_LAUNCHER="nobody") == (2, "", said)


def test_a_rank_of_torchrun_whose_agent_and_store_are_gone_ends_at_once():
    names = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    with socket.create_server(("127.0.0.1", 0)) as store:
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
        assert rank(**names)[1] == "imports\n"
    assert rank(**names)[0] == 1
    assert rank(**names, TRAINER_RANK_BOUND="1")[:2] == (0, "imports\n")  # started by a rank, with its variables


def test_what_a_rank_starts_is_no_rank():
    code = "import trainer, os; print(os.environ.get('TRAINER_LAUNCHER'), os.environ['TRAINER_RANK_BOUND'])"
    assert done(started(code, LOCAL_RANK="1", TRAINER_LAUNCHER=str(os.getpid())))[:2] == (0, "None 1\n")


@pytest.mark.parametrize(
    ("code", "said"), [("input()", "was killed by SIGKILL"), ("import sys; sys.exit(3)", "ended with exit code 3")]
)
def test_a_rank_that_ends_before_the_run_has_a_watch_ends_the_first_one(code, said):
    first = started(WATCHES, code)
    if "SIGKILL" in said:
        os.kill(int(first.stdout.readline()), signal.SIGKILL)
    code, _, errors = done(first)
    assert code == 1
    assert re.fullmatch(rf"trainer: error: rank 1 \(pid \d+\) {said} before training: nothing is lost\n", errors)


def is_rank(pid, number):
    try:
        return f"LOCAL_RANK={number}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def second_rank(run):
    """Its number, as soon as it is there."""
    found = []
    wait_until(lambda: found.extend(pid for pid in run.pids() if is_rank(pid, 1)) or found)
    return found[0]


def test_a_rank_killed_while_it_imports_ends_the_others(start):
    run = start("plain", 2)
    pid = second_rank(run)
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 1
    run.assert_nothing_left()
    said = f"trainer: error: rank 1 (pid {pid}) was killed by SIGKILL before training: nothing is lost"
    assert run.errors() == [said]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["plain", "torchrun"])
def test_the_launcher_is_killed_while_the_ranks_import_and_none_is_left(launcher, start):
    run = start(launcher, 2)
    second_rank(run)
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left()
