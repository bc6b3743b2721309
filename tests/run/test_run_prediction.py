"""A run that plans within its budget, predicts what it needs, and says how far off it was."""

from __future__ import annotations

import json
import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.warm import python

from trainer import Memory, Recipe, RecipeError, Run
from trainer.api import fit
from trainer.commands.recipes import load_recipe
from trainer.engine.events import Counters
from trainer.errors import RunError
from trainer.fakegpu.gpus import host_as_device
from trainer.launching.world import World
from trainer.memory.plan import decide_plan
from trainer.planner.knobs import apply_settings, combinations, free_knobs, is_sensible, micro_batch_sizes, wants_plan
from trainer.planner.report import Candidate
from trainer.run.run_prediction import (
    PredictionListener,
    RunPrediction,
    _awaited,
    _search,
    _shared_plan_file,
    _through_file,
    resolve_plan,
    start_prediction,
)
from trainer.system.child_jobs import ChildJob

pytestmark = [pytest.mark.forecast, pytest.mark.usefixtures("no_pictures")]

ALONE = World("python", "cpu", 1)
ONLY_MICRO_BATCHES = [
    "--memory.micro_batch_size=auto",
    "--memory.strategy=ddp",
    "--memory.activation_checkpointing=full",
]
"""What leaves the planner little to try."""


@pytest.fixture(autouse=True)
def alone():
    """Without the group of ranks that another test may have left to this process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def digits(**changes) -> Recipe:
    return load_recipe("vit_digits")[0].replace(**changes)


def in_fresh_process(tmp_path, *arguments: str) -> tuple[int, str, dict]:
    """Exit code, output and summary of ``trainer fit``: a process that has trained cannot predict any more."""
    words = ["-m", "trainer", "fit", "vit_digits", *arguments, f"--run.dir={tmp_path / 'run'}", "--max_steps=2"]
    done = python(*words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    summary = tmp_path / "run" / "summary.json"
    return done.returncode, done.stdout + done.stderr, json.loads(summary.read_text()) if summary.is_file() else {}


ON_A_FAKE_GPU = """
import sys
from trainer.cli import run
from trainer.fakegpu.gpus import gpu_named
from trainer.run import run_prediction as forecast
forecast.this_device = lambda accelerator: gpu_named("h100-sxm")
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("extra", [(), ("--run.predict=false",)])
def test_a_run_on_a_gpu_prints_one_line_on_what_would_be_faster(tmp_path, extra) -> None:
    """The run is on a CPU; its forecast is for the card that it believes in."""
    flags = [
        "--max_steps=1",
        "--data.test_fraction=0.9",
        f"--run.dir={tmp_path / 'run'}",
        "--run.evaluate=false",
        *extra,
    ]
    done = python("-c", ON_A_FAKE_GPU, "fit", "vit_digits", *flags, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = [line for line in (done.stdout + done.stderr).splitlines() if "faster than" in line]
    assert done.returncode == 0, done.stderr
    assert len(found) == (not extra), done.stdout
    for line in found:  # a tiny model is bound by its launches
        assert re.search(
            r"faster than [\d.]+ ms per step \(estimate\), .*: --memory\.compile blocks \([\d.]+ ms\)$",
            line,
        )


@pytest.mark.slow
def test_a_run_says_what_it_will_need_and_how_far_off_that_was(tmp_path) -> None:
    code, output, summary = in_fresh_process(tmp_path, "--data.test_fraction=0.9")
    assert code == 0, output
    peak = r"predicted peak: [\d.]+ MB of host memory for training, plus about 40 MB for CPU kernels"
    assert re.search(rf"{peak}; [\d.]+ GB available: fits", output)
    assert ": fits" in output
    memory = summary["memory"]
    measured = memory["host_peak_gb"] - memory["host_idle_gb"]
    assert memory["predicted_reserved_gb"] == pytest.approx(measured, abs=0.1)
    assert memory["prediction_error"] == pytest.approx(memory["predicted_reserved_gb"] / measured - 1)


@pytest.mark.slow
def test_a_budget_makes_the_planner_choose_for_all_ranks_alike(tmp_path) -> None:
    arguments = ["--run.devices=2", "--memory.budget=46MB", "--batch_size=256", *ONLY_MICRO_BATCHES]
    code, output, summary = in_fresh_process(tmp_path, *arguments, "--run.evaluate=false", "--model.layers=2")
    assert code == 0, output
    assert output.count("planner: batch 256") == 1
    assert summary["micro_batch_size"] < 128
    assert summary["world_size"] == 2
    assert summary["memory"]["predicted_reserved_gb"] <= 0.046


@pytest.mark.slow
def test_a_budget_that_nothing_fits_in_is_refused_with_what_is_missing(tmp_path) -> None:
    small = ["--memory.budget=1MB", "--batch_size=2", "--model.layers=1", "--optim.name=sgd"]  # few plans to propose
    code, output, _ = in_fresh_process(tmp_path, *small, *ONLY_MICRO_BATCHES)
    assert code == 2
    line = next(line for line in output.splitlines() if line.startswith("trainer: error:"))
    assert "memory.budget=1MB" in line
    assert "the smallest needs" in line


def test_what_auto_leaves_open() -> None:
    recipe, auto = digits(), Memory(activation_checkpointing="auto")
    budget = Memory(budget="1GB", cpu_offload="optimizer")
    assert resolve_plan(recipe, ALONE, pytest.fail) == (recipe, None)
    assert [wants_plan(recipe), wants_plan(digits(memory=auto)), wants_plan(digits(memory=budget))] == [0, 1, 1]
    looked_for = {"activation_checkpointing", "activation_offload", "cpu_offload"}
    assert looked_for & {*free_knobs(auto)} == {"activation_checkpointing"}
    assert looked_for & {*free_knobs(budget)} == {"activation_checkpointing", "activation_offload"}
    refused = Memory(budget="1GB", optimizer_in_backward=False)  # which the default, null, leaves to the planner
    assert {*free_knobs(Memory(budget="1GB"))} - {*free_knobs(refused)} == {"optimizer_in_backward"}
    assert decide_plan(digits(), 1).memory.optimizer_in_backward is False
    with pytest.raises(RecipeError, match=r"memory\.cpu_offload=auto"):  # without a planner
        decide_plan(digits(memory=Memory(cpu_offload="auto")), 1)


def test_combinations_keep_what_the_recipe_sets_however_little_sense_it_makes() -> None:
    recipe = digits(memory=Memory(budget="1GB", activation_checkpointing="full"))
    for settings in combinations(recipe, 1):
        assert apply_settings(recipe, settings).memory.activation_checkpointing == "full"
    assert {one.get("memory.cpu_offload", "none") for one in combinations(recipe, 1, False)} == {"none"}
    for wish in ("selective", 0.5):
        memory = Memory(budget="1GB", activation_offload=True, activation_checkpointing=wish)
        assert combinations(digits(memory=memory), 1)
    assert combinations(digits(memory=Memory(budget="1GB", reshard_after_forward=False)), 1)
    late = combinations(digits(memory=Memory(budget="1GB", sync_every_micro_step=False)), 2)
    assert all(is_sensible(apply_settings(recipe, one).memory, 2) for one in late)
    assert {one["memory.strategy"] for one in late} == {"ddp", "fsdp"}
    every = combinations(digits(memory=Memory(budget="1GB")), 2)
    kept = [one for one in every if not one["memory.reshard_after_forward"]]
    assert {one["memory.cpu_offload"] for one in kept} == {"none", "optimizer"}
    assert {one["memory.sync_every_micro_step"] for one in kept} == {None, True}


def test_micro_batches_are_one_for_each_number_of_micro_steps() -> None:
    auto = Memory(micro_batch_size="auto")
    assert micro_batch_sizes(digits(batch_size=64, memory=auto), 2) == [32, 16, 11, 8, 7, 6, 5, 4, 3, 2, 1]
    assert micro_batch_sizes(digits(batch_size=24, memory=auto), 1) == [24, 12, 8, 6, 5, 4, 3, 2, 1]
    assert micro_batch_sizes(digits(batch_size=5, memory=auto), 1) == [5, 3, 2, 1]
    assert micro_batch_sizes(digits(memory=Memory(micro_batch_size=4)), 1) == [None]


def test_other_ranks_take_the_plan_of_the_first_or_fail_as_it_does(tmp_path, monkeypatch) -> None:
    place, plan = tmp_path / "plan.json", {"memory.micro_batch_size": 4}
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _through_file(place, lambda: plan) == plan
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _through_file(place, lambda: pytest.fail("asked again")) == plan
    for error in (RecipeError("nothing fits"), OSError("the disk is full")):

        def fail(error=error) -> dict:
            raise error

        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(type(error), match=str(error)):
            _through_file(place, fail)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(RecipeError, match=str(error)):
            _through_file(place, dict)


def test_a_first_rank_that_is_killed_while_it_decides_is_not_waited_for(tmp_path) -> None:
    place = tmp_path / "plan.json"
    code = (
        "import os; from pathlib import Path; from trainer.run.run_prediction import _through_file; "
        f"_through_file(Path({str(place)!r}), lambda: os.kill(os.getpid(), 9))"
    )
    assert python("-c", code, env=os.environ | {"LOCAL_RANK": "0"}).returncode == -9
    with pytest.raises(RunError, match="was killed while planning"):
        _awaited(place)


def test_a_plan_of_an_earlier_launch_is_not_taken(tmp_path, monkeypatch) -> None:
    """Not that of an earlier launcher which had the number of this one's, nor that of an attempt before this."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    places = []
    for began in (1, 2):
        monkeypatch.setattr("trainer.system.processes._stat", lambda pid, began=began: ("S", began, 1))
        for attempt in "01":
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
            places.append(_shared_plan_file())
            places[-1].write_text(json.dumps({"settings": {"began": began, "attempt": attempt}}))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert len(set(places)) == 4
    assert _through_file(places[2], dict) == {"began": 2, "attempt": "0"}
    monkeypatch.setattr("trainer.run.run_prediction.MAX_SECONDS", 0.3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(RunError, match="made no plan within"):
        _awaited(_shared_plan_file())


@pytest.mark.parametrize("taken", ["open to all", "a link", "a file"])
def test_a_folder_that_others_can_reach_is_no_place_for_a_plan(tmp_path, monkeypatch, taken) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"trainer-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(0o700)
    if taken == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir() if taken == "open to all" else folder.touch()
        folder.chmod(0o777 if taken == "open to all" else 0o700)
    with pytest.raises(RunError, match=rf"{folder} must be a folder that belongs to you .* set TMPDIR"):
        _shared_plan_file()


def test_the_ranks_of_a_machine_agree_where_nobody_else_can_write(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place, victim = _shared_plan_file(), tmp_path / "victim"
    assert place == _shared_plan_file()
    assert place.parent.stat().st_mode & 0o777 == 0o700
    victim.write_text("precious")
    place.symlink_to(victim)
    monkeypatch.setenv("LOCAL_RANK", "0")
    _through_file(place, lambda: {"memory.micro_batch_size": 4})
    assert victim.read_text() == "precious"
    assert not place.is_symlink()


def forecast_of(recipe, world=ALONE, known=None):
    return start_prediction(recipe, decide_plan(recipe, world.world_size), world, known)


@pytest.mark.slow
def test_only_the_first_rank_predicts_also_when_it_has_trained_on_its_cpu(monkeypatch, tmp_path) -> None:
    fit(digits(max_steps=1, run=Run(dir=str(tmp_path / "first"), progress=False, evaluate=False, predict=False)))
    assert re.match(r"predicted peak: [\d.]+ MB of host memory ", forecast_of(digits()).lines(60)[0])
    assert forecast_of(digits(run=Run(predict=False))) is None
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert forecast_of(digits(), World("torchrun", "cpu", 2)) is None


def failing() -> None:
    raise ValueError("this model cannot be traced")


@pytest.mark.parametrize(
    "why", ["this model cannot be traced", "has used its GPU already", "has already joined a process group"]
)
def test_a_prediction_that_cannot_be_made_stops_nobody_and_says_why(why, monkeypatch) -> None:
    if "traced" in why:
        outlook = RunPrediction(ChildJob(failing), host_as_device(), 10**9)
    else:
        name = "torch.cuda.is_initialized" if "GPU" in why else "torch.distributed.is_initialized"
        monkeypatch.setattr(name, lambda: True)
        outlook = forecast_of(digits())
    (line,) = outlook.lines(60)
    assert "unknown" in line
    assert why in line
    assert outlook.compare({"host_peak_gb": 2.0, "host_idle_gb": 1.0}) == {}
    outlook.close()


def test_a_plan_of_an_earlier_run_of_this_process_is_not_taken(monkeypatch) -> None:
    monkeypatch.delenv("TRAINER_PLANNED", raising=False)
    world, auto = World("python", "cpu", 2), Memory(budget="1GB", micro_batch_size="auto")
    for size, batch, expected in ((32, 64, 32), (128, 64, 32), (128, 256, 128)):
        monkeypatch.setattr(
            "trainer.run.run_prediction._search", lambda *_, size=size: Candidate({"memory.micro_batch_size": size}, "")
        )
        decided, _ = resolve_plan(digits(memory=auto, batch_size=batch), world, print)
        assert decided.memory.micro_batch_size == expected
    monkeypatch.delenv("TRAINER_PLANNED")


def test_what_the_search_has_predicted_is_not_predicted_again_and_the_network_is_said(monkeypatch) -> None:
    said: list[str] = []
    auto = digits(memory=Memory(budget="1GB", micro_batch_size="auto", strategy="ddp"), batch_size=4)
    chosen = SimpleNamespace(plan="small", reason="it fits", flags={"memory.micro_batch_size": 2}, prediction=object())
    report = SimpleNamespace(chosen=chosen, explanations=[])
    monkeypatch.setattr("trainer.run.run_prediction.Search", lambda *_, **__: SimpleNamespace(run=lambda: report))
    decided, known = resolve_plan(auto, ALONE, said.append)
    assert decided.memory.micro_batch_size == 2
    assert said == ["planner: small: it fits"]
    outlook = forecast_of(decided, known=known)
    assert (outlook.child, outlook.prediction) == (None, chosen.prediction)
    _search(auto, World("python", "cpu", 2, nodes=2), said.append)
    assert said[-1] == "planner: assumes ib-hdr between the nodes; trainer plan --interconnect compares others"


def slow_failure() -> None:
    time.sleep(0.5)
    failing()


def test_a_late_prediction_is_shown_once_and_at_the_latest_after_the_last_step() -> None:
    shown: list[str] = []
    outlook = RunPrediction(ChildJob(slow_failure), host_as_device(), 10**9, first=False)
    listener = PredictionListener(outlook, shown.append)
    listener.on_step(Counters(), None)
    listener.on_fit_end(Counters())
    listener.on_fit_end(Counters())
    (line,) = shown
    assert line.startswith("predicted peak: unknown: ValueError: this model cannot be traced")
    outlook.close()


@pytest.mark.slow
def test_a_text_model_is_predicted_when_the_micro_batch_is_open(tmp_path) -> None:
    """Its positions are real tensors also in a plan, and the rehearsal restores them."""
    table = tmp_path / "r.csv"
    table.write_text("text,label\n" + "".join(f"word number {n},{n % 2}\n" for n in range(40)))
    flags = ["--model.name=distilbert", "--model.config={n_layers: 1, dim: 32, n_heads: 2, hidden_dim: 32}"]
    flags += ["--model.tokenizer=bytes", "--model.weights=null", "--data.max_length=32", "--max_steps=1"]
    flags += ["--memory.micro_batch_size=auto", f"--run.dir={tmp_path / 'run'}", f"--data.cache_dir={tmp_path / 'c'}"]
    done = python("-m", "trainer", "fit", "text_files", f"--data.train_file={table}", *flags)
    assert done.returncode == 0, done.stderr
    assert re.search(r"predicted peak: [\d.]+ MB of host memory", done.stdout + done.stderr), done.stderr
