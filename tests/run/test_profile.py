"""Where the time goes: the stopwatch's share of waiting for data, MFU, and ``run.profile``."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.resumed import recipe
from helpers.warm import python

from trainer import RecipeError
from trainer.api import fit
from trainer.engine.cut import Cut
from trainer.engine.events import Counters
from trainer.engine.step import StepResult
from trainer.engine.window import Windows
from trainer.run.listeners import ThroughputMeter
from trainer.run.profile import union

pytestmark = pytest.mark.usefixtures("no_pictures")


class Clock:
    """Shows the time that was last set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def result(tokens: int = 0) -> StepResult:
    return StepResult(0.5, {"loss": 0.5}, 1.0, 0.1, samples=8, skipped=False, tokens=tokens)


def test_what_is_loaded_for_is_waited_for_and_evaluations_are_not(monkeypatch) -> None:
    clock, heard = Clock(), []
    watch = ThroughputMeter(lambda: 0.001, clock)
    load = watch.wrap_on_load(lambda samples: heard.append(samples))
    watch.on_fit_start(Counters(), 2)
    # A micro-batch is asked for at 1, another at 3, both are there at 4, the step is done at 10.
    for now, samples in ((1, [0]), (3, [1]), (4, [])):
        clock.now = now
        load(samples)
    clock.now = 10
    watch.on_step(Counters(), result(tokens=500))
    assert heard == [[0], [1], []]
    assert watch.speed == (0.8, 50.0, 0.3, 0.05)
    clock.now = 100
    watch.on_evaluation(Counters(), None)
    clock.now = 110
    watch.on_step(Counters(), result(tokens=500))
    assert watch.speed == (0.8, 50.0, 0.15, 0.05)
    again = ThroughputMeter(lambda: None, clock)
    again.load_state_dict(json.loads(json.dumps(watch.state_dict())))
    again.on_fit_start(Counters(), 3)
    clock.now += 20
    again.on_step(Counters(), result())
    assert again.speed == (0.6, 25.0, 0.075, None)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_tokens_of_a_batch_are_those_of_all_ranks_without_padding(rank) -> None:
    windows = Windows(
        size=10,
        cut_at=lambda epoch: Cut(batch_size=4, micro_batch_size=2, accumulate=1),
        fetch=lambda requests: (request for request in requests),
        weigh=lambda batch: {"loss": 1.0},
        seed=0,
        rank=rank,
        world_size=2,
        lengths=[*range(1, 11)],
    )
    assert sum(window.tokens for window in windows.epoch(0)) == 55
    windows.lengths = None
    assert [window.tokens for window in windows.epoch(0)] == [0, 0, 0]


def test_without_tokens_and_before_the_first_step_nothing_is_guessed() -> None:
    assert ThroughputMeter().speed == (0.0, None, 0.0, None)


def test_time_in_several_spans_counts_once_and_only_within_the_steps() -> None:
    assert union([(12, 15), (11, 13), (0, 1), (19, 30), (13, 14)], 10.0, 20.0) == 5.0
    assert union([], 10.0, 20.0) == 0.0


def profiled(folder, **changes: Any) -> Any:
    return recipe(folder, run={"profile": 2, "predict": False}, **changes)


def shares(text: str) -> dict[str, float]:
    """Of the parts that follow one another, in percent."""
    block = text.split("\n\n")[1].splitlines()[1:]
    return {line.split(" ms  ")[1]: float(line.split()[0]) for line in block}


@pytest.mark.slow
def test_a_profile_has_our_phases_and_a_table_whose_shares_are_those_of_all(tmp_path, capsys) -> None:
    own = profiled(tmp_path / "run", max_steps=5)
    summary = fit(own.replace(run=replace(own.run, progress=True)))
    assert summary.tokens_per_second is summary.mfu is None
    assert 0 < summary.data_share < 1
    trace = json.loads(gzip.decompress((tmp_path / "run/profile.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    micro_steps = 2 * 24 // 4
    found = {name: names.count(f"trainer: {name}") for name in ("data", "forward", "backward", "step")}
    assert found == {"data": micro_steps, "forward": micro_steps, "backward": micro_steps, "step": 2}
    text = (tmp_path / "run/profile.txt").read_text()
    assert text.startswith("2 steps, ")
    parts = shares(text)
    assert [*parts] == ["waiting for data", "forward", "backward", "optimizer step", "between these"]
    assert 99.5 < sum(parts.values()) < 100.5
    assert min(parts.values()) >= 0
    operations = text.split("\n\n")[-1].splitlines()[1:]
    assert len(operations) == 20  # which ones is a matter of times
    assert any(" aten::" in line for line in operations)
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("profile of 2 steps: "))
    assert said.startswith("profile of 2 steps: waiting for data ")
    assert said.endswith("; profile.txt, profile.json.gz; peak CPU memory includes the profiler's records")
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("steps", "fix"), [(4, "lower it to 1, or"), (3, "leave it out, or")])
def test_a_run_with_too_few_steps_is_refused(tmp_path, steps, fix) -> None:
    with pytest.raises(RecipeError, match=f"run.profile=2 .* the run has only {steps}: {fix} raise max_steps"):
        fit(profiled(tmp_path / "run", max_steps=steps))


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps_are_refused(tmp_path, steps) -> None:
    with pytest.raises(RecipeError, match=r"run\.profile"):
        recipe(tmp_path, run={"profile": steps})


@pytest.mark.first(1)
@pytest.mark.parametrize(("fails_in", "recorded"), [(2, None), (5, "1 steps")])
def test_a_run_that_fails_leaves_the_steps_that_were_recorded_or_nothing(tmp_path, fails_in, recorded, monkeypatch):
    from trainer.engine.step import Stepper

    update, calls = Stepper.update, []

    def failing(self: Stepper, *given: Any) -> StepResult:
        calls.append(1)
        if len(calls) == fails_in:
            raise ValueError("broken")
        return update(self, *given)

    monkeypatch.setattr(Stepper, "update", failing)
    with pytest.raises(ValueError, match="broken"):
        fit(profiled(tmp_path / "run", max_steps=6))
    written = sorted(path.name for path in (tmp_path / "run").glob("*profile*"))
    assert written == ([] if recorded is None else ["profile.json.gz", "profile.txt"])
    if recorded:
        json.loads(gzip.decompress((tmp_path / "run/profile.json.gz").read_bytes()))
        assert 99.5 < sum(shares((tmp_path / "run/profile.txt").read_text()).values()) < 100.5


@pytest.mark.slow
def test_two_ranks_write_a_profile_each_and_the_first_tells(tmp_path) -> None:
    flags = [f"--run.dir={tmp_path / 'run'}", "--run.devices=2", "--run.accelerator=cpu", "--run.profile=2"]
    more = ["--max_steps=5", "--run.predict=false", "--run.evaluate=false"]
    done = python("-m", "trainer", "fit", "vit_digits", *flags, *more, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    names = [f"profile.rank{rank}.{kind}" for rank in (0, 1) for kind in ("json.gz", "txt")]
    assert sorted(path.name for path in (tmp_path / "run").glob("*profile*")) == names
    assert done.stdout.count("profile of 2 steps: ") == 1
    for rank in (0, 1):
        lines = (tmp_path / f"run/profile.rank{rank}.txt").read_text().splitlines()
        (communication,) = (line for line in lines if line.endswith(" communication"))
        assert 0 < float(communication.split()[0]) < 100


@pytest.mark.slow
def test_a_profile_changes_no_weight(tmp_path) -> None:
    from safetensors.torch import load_file

    fit(profiled(tmp_path / "with", max_steps=5))
    fit(recipe(tmp_path / "without", max_steps=5, run={"predict": False}))
    states = [load_file(next((tmp_path / name / "model").glob("*.safetensors"))) for name in ("with", "without")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
