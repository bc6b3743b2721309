"""Jobs in forked processes: their results, their errors, and their end."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
from helpers.tiny import target_of
from helpers.traced import Own, own_recipe

from trainer.errors import RecipeError
from trainer.memory.plan import decide_plan
from trainer.planner import target
from trainer.planner.fake_ranks import fake_ranks
from trainer.planner.gpus import gpu_named
from trainer.planner.predict import predict
from trainer.system.children import Child, Failed, in_child, in_children
from trainer.system.machine import FACTS


def refuse() -> None:
    raise RecipeError("memory.precision=12-true is not a precision: use 32-true")


def fail() -> None:
    raise ValueError("a shape does not fit\nand here is a page of details")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    raise SystemExit(3)


def test_a_result_comes_back() -> None:
    assert in_child(lambda: {"figures": [1, 2.5, None, "text"]}) == {"figures": [1, 2.5, None, "text"]}


def test_a_large_result_comes_back() -> None:
    assert len(in_child(lambda: "x" * 3_000_000)) == 3_000_000


def test_a_refusal_passes_through() -> None:
    with pytest.raises(RecipeError, match=r"^memory\.precision=12-true is not a precision: use 32-true$"):
        in_child(refuse)


def test_another_error_is_a_line_that_says_what_and_where() -> None:
    with pytest.raises(Failed) as caught:
        in_child(fail)
    assert re.fullmatch(r"ValueError: a shape does not fit \(.*test_children\.py:\d+\)", str(caught.value))


def test_what_the_job_says_itself_is_not_repeated() -> None:
    def job() -> None:
        raise Failed("the model cannot be traced: it asks a GPU for its name")

    with pytest.raises(Failed, match=r"^the model cannot be traced: it asks a GPU for its name$"):
        in_child(job)


def begun_with_cuda() -> bool:
    return bool(torch.cuda._is_in_bad_fork())


def test_a_new_process_can_use_cuda_whatever_this_one_has_done(monkeypatch: Any) -> None:
    """As where there is no NVML: torch has begun with CUDA to say whether there is a GPU, and a fork knows that."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert Child(begun_with_cuda, sees_gpu=True).result() is True
    assert Child(begun_with_cuda, sees_gpu=True, anew=True).result() is False


def test_a_gpu_that_no_fork_can_use_is_asked_for_by_a_new_process(monkeypatch: Any) -> None:
    card = gpu_named("h200")
    said = json.dumps([{**dict.fromkeys(FACTS), "name": card.reported, "total_memory": card.memory}])
    code = f"print({said!r})".replace("{", "{{").replace("}", "}}")  # it is formatted
    monkeypatch.setattr("trainer.system.machine.ASK", code)
    assert target.gpu_here() is None  # nothing to ask for
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(target, "seen_gpus", list)  # what CUDA says in such a fork
    assert target.gpu_here() == card


def test_a_killed_process_is_reported() -> None:
    with pytest.raises(Failed, match=r"ended with code -9: did memory run out\?"):
        in_child(be_killed)


def test_leaving_is_an_error_too() -> None:
    with pytest.raises(Failed, match=r"^SystemExit: 3 "):
        in_child(leave)


def test_one_that_fails_leaves_the_others_alone() -> None:
    jobs = [fail, lambda: "second", be_killed, refuse, lambda: "fifth"]
    results = dict(in_children(jobs, 2))
    assert [type(results[number]) for number in range(5)] == [Failed, str, Failed, RecipeError, str]
    assert (results[1], results[4]) == ("second", "fifth")


def test_a_child_can_be_waited_for_and_killed() -> None:
    child = Child(partial(time.sleep, 60))
    assert not child.wait(0.05)
    child.kill()
    assert child.wait(5)
    assert isinstance(child.result(), Failed)


def test_a_child_that_is_killed_as_it_answers_is_reported() -> None:
    child = Child(lambda: "x" * 3_000_000)
    assert child.wait(10)
    time.sleep(0.2)  # the pipe is full now, with 64 KiB of the answer
    child.kill()
    assert re.search(r"ended with code -9: did memory run out\?", str(child.result()))


def test_those_that_nobody_waits_for_any_longer_are_killed(tmp_path: Any) -> None:
    def linger(name: str) -> None:
        (tmp_path / name).write_text(str(os.getpid()))
        time.sleep(60)

    def first() -> str:
        while not (tmp_path / "lingers").exists():
            time.sleep(0.01)
        return "first"

    results = in_children([first, partial(linger, "lingers")], 2)
    assert next(results) == (0, "first")
    results.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "lingers").read_text()), 0)


def test_an_error_of_the_users_model_names_its_place() -> None:
    recipe = own_recipe(model=Own(fails=True))
    with pytest.raises(Failed, match=r"^KeyError: 'no such column' \(.*traced\.py:\d+\)$"):
        predict(recipe, decide_plan(recipe, 1), target_of())


def test_a_model_of_ones_own_is_predicted() -> None:
    recipe = own_recipe()
    prediction = predict(recipe, decide_plan(recipe, 1), target_of(), timeline=True)
    assert 0 < prediction.allocated <= prediction.reserved
    assert sum(prediction.categories.values()) == prediction.allocated
    assert prediction.phases[prediction.peak_phase]["allocated"] == prediction.allocated
    assert prediction.largest[0][-1] == max(size for *_, size in prediction.largest)
    assert max(prediction.timeline["reserved"]) == prediction.reserved  # type: ignore[index]
    assert prediction.cost.step_ms > prediction.cost.update_ms > 0


def in_eight_ranks() -> int:
    fake_ranks(8)
    return torch.distributed.get_world_size()


def test_a_process_in_a_group_of_ranks_can_predict_others():
    joined = torch.distributed.is_initialized()
    if not joined:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert in_child(in_eight_ranks) == 8
        assert torch.distributed.get_world_size() == 1
    finally:
        if not joined:
            torch.distributed.destroy_process_group()
