"""Ranks of one machine that no launcher watches end when one of them is gone before they have met."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import LONG
from helpers.ranks import free_port
from helpers.started import FOREIGN, open_links

from trainer.launching import company

if not sys.platform.startswith("linux"):
    pytest.skip("abstract sockets", allow_module_level=True)

RANK = """
import sys, time
from trainer.launching import company
company.SECONDS_TO_FAIL = 0.1
company.keep_company()
print("torch" in sys.modules, len(company._kept), flush=True)
for line in sys.stdin:
    company.have_met()
    print("met", flush=True)
"""


@pytest.fixture
def start():
    """A function that starts a rank with these variables; it prints whether it imported torch, and what it watches."""
    started = []

    def begin(**names):
        clean = {key: value for key, value in os.environ.items() if not key.startswith((*FOREIGN, "SLURM", "TRAINER_"))}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", RANK], env=clean | names, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def torchruns(port, size=3):
    return [{"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)} for rank in range(size)]


def slurms(port, size=3):
    shared = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size)}
    return [shared | {"SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": str(rank)} for rank in range(size)]


@pytest.mark.first(1)
@pytest.mark.parametrize("variables", [torchruns, slurms])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_before_the_others_have_met_it_ends_them(start, variables, victim):
    ranks = [start(**names) for names in variables(free_port())]
    for rank in ranks:
        assert rank.stdout.readline() == "False 1\n"  # before anything heavy is imported
    wait_until(lambda: connections(ranks[0].pid) >= 2 and all(connections(rank.pid) >= 1 for rank in ranks))
    ranks[victim].send_signal(signal.SIGKILL)
    for number, rank in enumerate(ranks):
        code, said = rank.wait(LONG), rank.stderr.read()
        if number != victim:
            assert code == 1
            gone = victim if 0 in (number, victim) else 0  # which ends because of the other one
            assert said.endswith(f"error: rank {gone} was killed or has failed before training: nothing is lost\n")


def test_ranks_that_have_met_do_not_watch_each_other_any_more(start):
    ranks = [start(**names) for names in torchruns(free_port(), 2)]
    for rank in ranks:
        assert rank.stdout.readline() == "False 1\n"
    wait_until(lambda: connections(ranks[0].pid) >= 1)
    ranks[1].stdin.write("go\n")
    ranks[1].stdin.flush()
    assert ranks[1].stdout.readline() == "met\n"
    ranks[0].kill()
    ranks[0].wait()
    with pytest.raises(subprocess.TimeoutExpired):
        ranks[1].wait(1.0)
    out, said = ranks[1].communicate(timeout=LONG)
    assert (ranks[1].returncode, out, said) == (0, "", "")


@pytest.mark.parametrize(
    "names",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        {"RANK": "0", "WORLD_SIZE": "2", "RAY_JOB_ID": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},  # a batch script
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
    ],
)
def test_nobody_is_watched_where_a_launcher_does_it_or_on_several_machines(monkeypatch, names):
    monkeypatch.setattr(company, "_kept", [])
    company.keep_company(names)
    assert company._kept == []


def test_what_another_user_or_nobody_listens_on_is_no_rank(start, monkeypatch):
    monkeypatch.setattr(company, "_kept", [])
    names = torchruns(free_port(), 2)
    company.keep_company(names[0])
    (own,) = company._kept
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(own.address(0))
        assert company._user_of(line) == os.getuid()
    company.keep_company(names[0])
    assert company._kept == [own]  # one watch at a time
    company.have_met()
    company.keep_company(names[0])
    assert len(company._kept) == 2  # of the next run of this process
    company.have_met()


def connections(pid: int) -> int:
    """Connections to the abstract sockets of a process that it has not accepted."""
    links = set(open_links(pid))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    names = {
        row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in links and row[7].startswith("@trainer-")
    }
    return sum(len(row) > 7 and row[7] in names for row in rows) - len(names)


def wait_until(condition):
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
