"""Jobs in forked processes: their results, their errors, and their end."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LONG, has_ended, wait_until

from trainer.errors import RecipeError
from trainer.fakegpu import target
from trainer.fakegpu.fake_process_group import fake_ranks
from trainer.fakegpu.gpus import gpu_named
from trainer.system.child_jobs import Bounded, ChildError, ChildJob, run_in_child, run_in_children
from trainer.system.machine import FACTS

LARGE = {"text": "x" * 3_000_000, "figures": [1, 2.5, None]}


def raises(error: BaseException) -> None:
    raise error


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("job", "kind", "said"),
    [
        (partial(raises, RecipeError("a=1 is wrong: use 2")), RecipeError, "a=1 is wrong: use 2"),
        (partial(raises, ValueError("a\nand details")), ChildError, r"ValueError: a \(.*test_children\.py:\d+\)"),
        (partial(raises, ChildError("it asks a GPU for its name")), ChildError, "it asks a GPU for its name"),
        (partial(raises, SystemExit(3)), ChildError, r"SystemExit: 3 \(.*"),  # leaving is an error too
        (be_killed, ChildError, "its process ended with code -9: check whether memory ran out"),
    ],
)
def test_what_a_job_ends_with_is_said_in_a_line(job: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        run_in_child(job)
    assert re.fullmatch(said, str(caught.value))


def test_one_that_fails_leaves_the_others_alone() -> None:
    jobs = [partial(raises, ValueError()), lambda: LARGE, be_killed, partial(raises, RecipeError()), lambda: "fifth"]
    results = dict(run_in_children(jobs, 2))
    assert [type(results[number]) for number in range(5)] == [ChildError, dict, ChildError, RecipeError, str]
    assert (results[1], results[4]) == (LARGE, "fifth")


@pytest.mark.slow
def test_a_new_process_can_use_cuda_whatever_this_one_has_done(monkeypatch: Any) -> None:
    """As where there is no NVML: torch has begun with CUDA to say whether there is a GPU, and a fork knows that."""
    begun_with_cuda = partial(eval, "__import__('torch').cuda._is_in_bad_fork()")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert ChildJob(begun_with_cuda, sees_gpu=True).result() is True
    assert ChildJob(begun_with_cuda, sees_gpu=True, anew=True).result() is False


def test_a_gpu_that_no_fork_can_use_is_asked_for_by_a_new_process(monkeypatch: Any) -> None:
    card = gpu_named("h200")
    said = json.dumps([{**dict.fromkeys(FACTS), "name": card.reported, "total_memory": card.memory}])
    code = f"print({said!r})".replace("{", "{{").replace("}", "}}")  # it is formatted
    monkeypatch.setattr("trainer.system.machine.ASK", code)
    assert target.gpu_here() is None  # nothing to ask for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target, "query_gpus", list)  # what CUDA says in such a fork
    assert target.gpu_here() == card


def test_a_child_can_be_waited_for_and_killed_also_as_it_answers() -> None:
    sleeps, answers = ChildJob(partial(time.sleep, 60)), ChildJob(lambda: LARGE)
    assert not sleeps.wait(0.05)
    assert answers.wait(LONG)  # the pipe is full then, with 64 KiB of the answer
    for child in (sleeps, answers):
        child.kill()
        assert child.wait(LONG)
        assert re.search("ended with code -9: check whether memory ran out", str(child.result()))


def test_those_that_nobody_waits_for_any_longer_are_killed(tmp_path: Any) -> None:
    def linger(name: str) -> None:
        (tmp_path / name).write_text(str(os.getpid()))
        time.sleep(60)

    def first() -> str:
        while not (tmp_path / "lingers").exists():
            time.sleep(0.01)
        return "first"

    results = run_in_children([first, partial(linger, "lingers")], 2)
    assert next(results) == (0, "first")
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "lingers").read_text()), 0)


def in_eight_ranks() -> int:
    fake_ranks(8)
    return torch.distributed.get_world_size()


def test_a_process_in_a_group_of_ranks_can_predict_others() -> None:
    joined = torch.distributed.is_initialized()
    if not joined:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert run_in_child(in_eight_ranks) == 8
        assert torch.distributed.get_world_size() == 1
    finally:
        if not joined:
            torch.distributed.destroy_process_group()


def asked(what: str, size: int = 0) -> Any:
    if what == "time":
        while True:
            pass
    if what == "memory":
        return len("x" * size)
    if what == "refuse":
        raise RecipeError("it is wrong")
    return os.kill(os.getpid(), signal.SIGKILL) if what == "die" else [what, os.getpid(), os.getppid()]


def test_a_bounded_job_is_ended_at_its_limits_and_called_again() -> None:
    call = Bounded(asked, seconds=0.2, memory=200_000_000)
    word, pid, parent = call("\ud800")
    assert (word, parent, pid == parent) == ("\ud800", os.getpid(), False)
    assert call("again")[1] == pid  # one process serves many calls
    for what, said in (("time", r"more than 0\.2 s of CPU time"), ("memory", r"more than 0\.2 GB of memory")):
        with pytest.raises(ChildError, match=said):
            call(what, 2**30)
    assert call("memory", 50_000_000) == 50_000_000
    with pytest.raises(ChildError, match="its process ended with code -9"):
        call("die")
    with pytest.raises(RecipeError, match="it is wrong"):
        call("refuse")
    killed = call("a")[1]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: has_ended(killed))
    assert call("b")[0] == "b"


@pytest.mark.slow
def test_each_process_has_a_bounded_job_of_its_own(monkeypatch: Any) -> None:
    """Also one that loads data: it may start no process of multiprocessing."""
    call = Bounded(asked, seconds=5.0, memory=10**9)
    mine = call("a")[1]

    def in_worker() -> list[int]:
        assert multiprocessing.current_process().daemon
        return [os.getpid(), *call("b")[1:]]

    worker, theirs, parent = run_in_child(in_worker)
    assert (theirs == mine, parent == worker) == (False, True)
    wait_until(lambda: not Path(f"/proc/{theirs}").exists())  # it ends with its process
    assert call("c")[1] == mine
    copy = pickle.loads(pickle.dumps(call))
    assert copy("d")[1] != mine
    monkeypatch.setattr("trainer.system.child_jobs.IDLE", 0.01)
    idle = Bounded(asked, seconds=5.0, memory=10**9)
    first = idle("e")[1]
    wait_until(lambda: has_ended(first))  # nothing was asked of it
    assert idle("f")[1] != first


def stuck_once(path: str) -> str:
    """Wait for ever without computing, as for a lock that was held at the fork; the second call answers."""
    if os.path.exists(path):
        return "answered"
    Path(path).touch()
    time.sleep(3600)
    return "never"


@pytest.mark.slow
def test_a_fork_that_is_stuck_is_replaced_once(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.system.child_jobs.WALL", 2.0)
    assert Bounded(stuck_once, seconds=5.0, memory=10**9)(str(tmp_path / "asked")) == "answered"
    with pytest.raises(ChildError, match="ended with code -9"):
        Bounded(time.sleep, seconds=5.0, memory=10**9)(3600)
