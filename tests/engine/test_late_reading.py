"""On a GPU the norm and the losses of a step are read in the next one. Everything else stays as it is.

The code that reads late is the same on every device, so a CPU runs it here: its fused AdamW skips by ``found_inf`` too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_step import engine_of
from helpers.memory_hog import Hungry
from helpers.ranks import RankPool
from helpers.resumed import TINY, FewDigits, assert_same_weights, losses, recipe, resume, saved
from safetensors.torch import load_file

from trainer import Optim
from trainer.api import fit
from trainer.engine import step as stepping
from trainer.engine.events import Listener
from trainer.engine.loop import NonFiniteError
from trainer.engine.loss_totals import LossTotals
from trainer.engine.schedule import CheckpointableLambdaLR
from trainer.engine.step import PhaseHooks

LATE = ("cuda", "cpu")


class Recorder(Listener):
    """What a listener hears, in JSON's terms, for NaN is not equal to itself."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_step(self, counters, result) -> None:
        self.heard.append(repr((counters, result)))


def trained(values, late, *, epochs=3, batch_size=2, world_size=1, max_skipped=20, phases=None, make=torch.optim.AdamW):
    """The engine and the recorder after training ``Linear`` on ``values``, one sample a micro-batch."""
    stepping.ASYNCHRONOUS, before = LATE if late else (), stepping.ASYNCHRONOUS
    try:
        engine, module, _ = engine_of(values, batch_size=batch_size, world_size=world_size)
        stepper, recorder, averages = engine.stepper, Recorder(), []
        optimizer = make(module.parameters(), lr=0.1, fused=True)
        stepper.attach(stepper.module, optimizer)
        stepper.scheduler = CheckpointableLambdaLR(optimizer, lambda step: 1 / (1 + step + 10 * stepper.skipped_steps))
        stepper.clip_norm, stepper.phases = 1.0, phases or PhaseHooks()
        stepper.average = lambda updates: averages.append([updates, *(p.tolist() for p in module.parameters())])
        engine.listeners = [recorder]
        engine.fit(epochs=epochs, max_skipped=max_skipped)
    finally:
        stepping.ASYNCHRONOUS = before
    # A kernel that skips the first step leaves a state of zeros, where none was made before: the same to the next step.
    states = {n: [value.tolist() for value in one.values()] for n, one in enumerate(optimizer.state.values())}
    state = {n: values for n, values in states.items() if values[0]}
    weights = [p.tolist() for p in module.parameters()]
    return stepper.reads_late, [weights, state, averages, stepper.state_dict(), recorder.heard, repr(engine.counters)]


VALUES = [1.0, 2.0, math.nan, 4.0, math.inf, 0.5, 1.5]


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], VALUES], ids=["finite", "skipping"])
def test_results_weights_states_and_averages_are_those_of_reading_at_once(values):
    (is_late, late), (is_late_too, at_once) = trained(values, True), trained(values, False)
    assert is_late
    assert not is_late_too
    assert late == at_once


def _on_two_ranks():
    return [trained([*VALUES, 3.0], late, world_size=2)[1] for late in (True, False)]


def test_a_bad_sample_on_one_rank_skips_the_step_on_both(ranks):
    for late, at_once in ranks(2).run(_on_two_ranks):
        assert late == at_once
        assert "skipped=True" in str(late)
        assert "skipped=False" in str(late)


def test_a_result_is_read_when_the_forward_of_the_next_step_is_launched():
    heard = []

    class Hearing(PhaseHooks):
        def enter(self, phase, micro=None):
            heard.append(phase)

    class Engaged(Recorder):
        def on_step(self, counters, result):
            heard.append(f"result {counters.step}")

    stepping.ASYNCHRONOUS, before = LATE, stepping.ASYNCHRONOUS
    try:
        engine, module, _ = engine_of([1.0] * 3, batch_size=1)
        engine.stepper.attach(engine.stepper.module, torch.optim.AdamW(module.parameters(), fused=True))
    finally:
        stepping.ASYNCHRONOUS = before
    engine.stepper.check, engine.stepper.phases, engine.listeners = None, Hearing(), [Engaged()]
    engine.fit(epochs=1)
    step = ["forward", "backward", "step"]
    second, third = (["forward", f"result {number}", "backward", "step"] for number in (1, 2))
    assert heard == [*step, *second, *third, "result 3"]


def test_too_many_skipped_steps_end_training_with_the_same_words_and_weights():
    said = []
    for late in (True, False):
        with pytest.raises(NonFiniteError, match=r"step 3 .*3 steps in a row.*samples of the step: ") as error:
            trained([math.nan] * 10, late, max_skipped=3)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_sgd_waits_for_its_momentum_and_adam_does_not(make):
    assert trained([1.0, 2.0], True, make=make)[0] == (make is torch.optim.Adam)


def test_a_rank_that_is_missing_skips_the_step():
    """A collective that was aborted leaves the count of ranks too low: the weights must not move by half a gradient."""
    window = next(iter(engine_of([1.0, 2.0])[0].windows.epoch(0)))
    totals = LossTotals(window, world_size=2)
    whole = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    assert totals.must_skip(whole) == 0
    assert totals.must_skip(whole - torch.tensor([0, 0, 1.0])) == 1
    assert totals.must_skip(whole * torch.tensor([math.nan, 1, 1])) == 1
    with pytest.raises(RuntimeError, match="not all ranks reached the end of the step"):
        totals.read(whole - torch.tensor([0, 0, 1.0]))


SETTINGS: dict[str, Any] = {"optim": Optim("adamw", lr=1e-2, schedule="cosine", clip_norm=1.0, ema=0.9)}


def outcome(folder: Path) -> list[Any]:
    """What a run of six steps has written, but for times."""
    checkpoints = {
        str(path.relative_to(folder)): {name: value.tolist() for name, value in load_file(path).items()}
        for path in sorted((folder / "checkpoints").rglob("*.safetensors"))
    }
    assert checkpoints
    summary = json.loads((folder / "summary.json").read_text())
    return [losses(folder), checkpoints, [summary[name] for name in ("steps", "skipped_steps", "metrics", "best")]]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_run_writes_the_same_metrics_and_checkpoints_and_resumes_to_the_same_end(tmp_path, monkeypatch):
    settings = SETTINGS | {"data": FewDigits(test_fraction=0.97), "eval_every": 3, "run": {"evaluate": True}}
    for name, types in (("at once", ()), ("late", LATE)):
        monkeypatch.setattr(stepping, "ASYNCHRONOUS", types)
        fit(recipe(tmp_path / name, **settings))
    assert outcome(tmp_path / "late") == outcome(tmp_path / "at once")
    for step in (2, 4, 6):
        assert saved(tmp_path / "late", step) == saved(tmp_path / "at once", step)
    resume(tmp_path / "late", tmp_path / "again", 2, **settings)
    assert_same_weights(tmp_path / "again", tmp_path / "late", rtol=0, atol=0)


@pytest.mark.usefixtures("no_pictures")
def test_a_step_that_runs_out_of_memory_comes_after_one_that_is_counted(tmp_path, monkeypatch):
    for name, types in (("at once", ()), ("late", LATE)):
        monkeypatch.setattr(stepping, "ASYNCHRONOUS", types)
        hungry = Hungry("custom", **TINY, most=3, after=7)
        fit(recipe(tmp_path / name, model=hungry, **SETTINGS))
    assert outcome(tmp_path / "late") == outcome(tmp_path / "at once")
    assert json.loads((tmp_path / "late" / "summary.json").read_text())["recoveries"] == 1


@pytest.mark.usefixtures("no_pictures")
def test_a_listener_of_the_recipe_hears_of_a_step_before_the_next_begins(tmp_path, monkeypatch):
    heard = []

    class Counting(Hungry):
        def losses(self, module, batch):
            heard.append("forward")
            return super().losses(module, batch)

    class Own(Listener):
        def on_step(self, counters, result):
            heard.append("step")

    monkeypatch.setattr(stepping, "ASYNCHRONOUS", LATE)
    model = Counting("custom", **TINY)
    fit(recipe(tmp_path, model=model, listeners=[Own()], max_steps=3, memory={"micro_batch_size": 24}))
    assert heard.count("step") == 3
    assert all(two != ("step", "step") for two in zip(heard, heard[1:], strict=False))  # a forward lies between


def _recovered(late: bool, phase: str, folder: str) -> list[Any]:
    from run.test_recovery import run

    stepping.ASYNCHRONOUS, before = LATE if late else (), stepping.ASYNCHRONOUS
    try:
        found = run({"phase": phase, "rank": 1, "most": 3, "after": 4}, {"strategy": "fsdp"}, folder)
    finally:
        stepping.ASYNCHRONOUS = before
    weights = {name: value.tolist() for name, value in found["weights"].items()} if found else {}
    return [weights, found["losses"], found["summary"]["recoveries"]] if found else []


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_all_ranks_take_a_step_again_after_one_that_is_counted(phase, tmp_path):
    pool = RankPool(2)  # whose processes no other test has left a group in
    try:
        late, at_once = (pool.run(_recovered, late, phase, str(tmp_path / str(late)))[0] for late in (True, False))
    finally:
        pool.close()
    assert late == at_once
    assert late[2] == 2
