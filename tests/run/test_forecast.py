"""A run that plans within its budget, predicts what it needs, and says how far off it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.warm import python

from trainer import Memory, Recipe, RecipeError, Run
from trainer.commands.recipes import load_recipe
from trainer.errors import RunError
from trainer.fit import fit
from trainer.launching.world import World
from trainer.memory.plan import decide_plan
from trainer.planner.gpus import host_as_device
from trainer.planner.knobs import applied, combinations, free_knobs, micro_batch_sizes, wants_plan
from trainer.run.forecast import Forecast, _awaited, _meeting_place, _through_file, forecast, planned
from trainer.system.children import Child

pytestmark = pytest.mark.forecast

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
    recipe, _ = load_recipe("vit_digits")
    return recipe.replace(**changes)


def in_fresh_process(arguments: list[str], tmp_path: Path, **environment: str) -> tuple[int, str, dict]:
    """Exit code, output and summary of ``trainer fit``: a process that has trained cannot predict any more."""
    words = ["-m", "trainer", "fit", "vit_digits", *arguments, f"--run.dir={tmp_path / 'run'}"]
    done = python(*words, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    summary = tmp_path / "run" / "summary.json"
    return done.returncode, done.stdout + done.stderr, json.loads(summary.read_text()) if summary.is_file() else {}


def test_a_run_says_what_it_will_need_and_how_far_off_that_was(tmp_path) -> None:
    code, output, summary = in_fresh_process(["--max_steps=2"], tmp_path)
    assert code == 0, output
    assert "predicted peak: 0.0" in output
    assert ": fits" in output
    memory = summary["memory"]
    measured = memory["host_peak_gb"] - memory["host_idle_gb"]
    assert memory["predicted_reserved_gb"] == pytest.approx(measured, abs=0.1)
    assert memory["prediction_error"] == pytest.approx(memory["predicted_reserved_gb"] / measured - 1)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_budget_makes_the_planner_choose_for_all_ranks_alike(tmp_path, ranks) -> None:
    arguments = [f"--run.devices={ranks}", "--memory.budget=46MB", "--batch_size=256", *ONLY_MICRO_BATCHES]
    code, output, summary = in_fresh_process([*arguments, "--max_steps=2", "--run.evaluate=false"], tmp_path)
    assert code == 0, output
    assert output.count("planner: batch 256") == 1
    assert summary["micro_batch_size"] < 256 // ranks
    assert summary["world_size"] == ranks
    assert summary["memory"]["predicted_reserved_gb"] <= 0.046


def test_a_budget_that_nothing_fits_in_is_refused_with_what_is_missing(tmp_path) -> None:
    code, output, _ = in_fresh_process(["--memory.budget=41MB", *ONLY_MICRO_BATCHES], tmp_path)
    assert code == 2
    line = next(line for line in output.splitlines() if line.startswith("trainer: error:"))
    assert "memory.budget=41MB" in line
    assert "the smallest plan needs" in line


def test_what_auto_leaves_open() -> None:
    plain = digits()
    assert not wants_plan(plain)
    assert wants_plan(digits(memory=Memory(budget="1GB")))
    auto = digits(memory=Memory(activation_checkpointing="auto"))
    assert wants_plan(auto)
    assert "activation_checkpointing" in free_knobs(auto.memory)
    assert "cpu_offload" not in free_knobs(auto.memory)
    budget = Memory(budget="1GB", cpu_offload="optimizer")
    assert "cpu_offload" not in free_knobs(budget)
    assert "activation_offload" in free_knobs(budget)


def test_combinations_keep_what_the_recipe_sets() -> None:
    recipe = digits(memory=Memory(budget="1GB", activation_checkpointing="full"))
    for settings in combinations(recipe, 1):
        assert applied(recipe, settings).memory.activation_checkpointing == "full"
    assert all(
        "memory.cpu_offload" not in one or one["memory.cpu_offload"] == "none" for one in combinations(recipe, 1, False)
    )


def test_micro_batches_halve_down_to_one() -> None:
    auto = Memory(micro_batch_size="auto")
    assert micro_batch_sizes(digits(batch_size=64, memory=auto), 2) == [32, 16, 8, 4, 2, 1]
    assert micro_batch_sizes(digits(batch_size=5, memory=auto), 1) == [5, 3, 2, 1]
    assert micro_batch_sizes(digits(memory=Memory(micro_batch_size=4)), 1) == [None]


def test_auto_without_a_planner_is_refused() -> None:
    from trainer.memory.plan import decide_plan

    with pytest.raises(RecipeError, match=r"memory\.cpu_offload=auto"):
        decide_plan(digits(memory=Memory(cpu_offload="auto")), 1)


def test_other_ranks_take_the_plan_of_the_first(tmp_path, monkeypatch) -> None:
    place = tmp_path / "plan.json"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _through_file(place, lambda: {"memory.micro_batch_size": 4}) == {"memory.micro_batch_size": 4}
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _through_file(place, lambda: pytest.fail("asked again")) == {"memory.micro_batch_size": 4}


def test_other_ranks_fail_as_the_first_one_does(tmp_path, monkeypatch) -> None:
    place = tmp_path / "plan.json"

    def refuse() -> dict:
        raise RecipeError("nothing fits")

    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RecipeError, match="nothing fits"):
        _through_file(place, refuse)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RecipeError, match="nothing fits"):
        _through_file(place, dict)


def test_a_first_rank_that_is_killed_while_it_decides_is_not_waited_for(tmp_path) -> None:
    place = tmp_path / "plan.json"
    code = (
        "import os; from pathlib import Path; from trainer.run.forecast import _through_file; "
        f"_through_file(Path({str(place)!r}), lambda: os.kill(os.getpid(), 9))"
    )
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"LOCAL_RANK": "0"}, check=False)
    assert killed.returncode == -9
    with pytest.raises(RunError, match="was killed while it decided on a plan"):
        _awaited(place)


def test_a_plan_of_an_earlier_launch_is_not_taken(tmp_path, monkeypatch) -> None:
    """Not that of an earlier launcher which had the number of this one's, nor that of an attempt before this."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    places = []
    for began in (1, 2):
        monkeypatch.setattr("trainer.system.processes._stat", lambda pid, began=began: ("S", began, 1))
        for attempt in "01":
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
            places.append(_meeting_place())
            places[-1].write_text(json.dumps({"settings": {"began": began, "attempt": attempt}}))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert len(set(places)) == 4
    assert _through_file(places[2], dict) == {"began": 2, "attempt": "0"}
    monkeypatch.setattr("trainer.run.forecast.MOST_SECONDS", 0.3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with pytest.raises(RunError, match="decided on no plan"):
        _awaited(_meeting_place())


@pytest.mark.parametrize("taken", ["open to all", "a link", "a file"])
def test_a_folder_that_others_can_reach_is_no_place_for_a_plan(tmp_path, monkeypatch, taken) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"trainer-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(0o700)
    if taken == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    elif taken == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch(0o600)
    with pytest.raises(RunError, match=rf"{folder} must be a folder of yours .* set TMPDIR"):
        _meeting_place()


def test_the_ranks_of_a_machine_agree_where_nobody_else_can_write(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = _meeting_place()
    assert place == _meeting_place()
    assert place.parent.stat().st_mode & 0o777 == 0o700
    victim = tmp_path / "victim"
    victim.write_text("precious")
    place.symlink_to(victim)
    monkeypatch.setenv("LOCAL_RANK", "0")
    _through_file(place, lambda: {"memory.micro_batch_size": 4})
    assert victim.read_text() == "precious"
    assert not place.is_symlink()


def test_a_recipe_without_knobs_to_decide_is_left_alone() -> None:
    recipe = digits()
    assert planned(recipe, ALONE, pytest.fail) is recipe


def forecast_of(recipe, world=ALONE):
    return forecast(recipe, decide_plan(recipe, world.size), world)


def test_only_the_first_rank_predicts(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert forecast_of(digits(), World("torchrun", "cpu", 2)) is None
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    assert forecast_of(digits(run=Run(predict=False))) is None


def failing(message: str) -> Forecast:
    def job() -> None:
        raise ValueError(message)

    return Forecast(Child(job), host_as_device(), 10**9)


def test_a_prediction_that_fails_stops_nobody() -> None:
    outlook = failing("this model cannot be traced")
    (line,) = outlook.lines()
    assert "not known" in line
    assert "this model cannot be traced" in line
    assert outlook.beside({"host_peak_gb": 2.0, "host_idle_gb": 1.0}) == {}


def test_a_process_that_has_trained_on_its_cpu_can_predict(tmp_path) -> None:
    fit(digits(max_steps=1, run=Run(dir=str(tmp_path / "first"), progress=False, evaluate=False, predict=False)))
    outlook = forecast_of(digits())
    assert outlook is not None
    assert outlook.lines()[0].startswith("predicted peak: 0.0")


def test_a_process_that_uses_its_gpu_says_why_it_cannot_predict(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    outlook = forecast_of(digits())
    assert outlook is not None
    (line,) = outlook.lines()
    assert "has used its GPU already" in line


def test_a_plan_of_an_earlier_run_of_this_process_is_not_taken(monkeypatch) -> None:
    monkeypatch.setattr("trainer.run.forecast._search", lambda recipe, world, say: {"memory.micro_batch_size": size})
    monkeypatch.delenv("TRAINER_PLANNED", raising=False)
    world, auto = World("python", "cpu", 2), Memory(budget="1GB", micro_batch_size="auto")
    size = 32
    assert planned(digits(memory=auto), world, print).memory.micro_batch_size == 32
    size = 128
    assert planned(digits(memory=auto), world, print).memory.micro_batch_size == 32
    assert planned(digits(memory=auto, batch_size=256), world, print).memory.micro_batch_size == 128
    monkeypatch.delenv("TRAINER_PLANNED")


def test_other_ranks_do_not_wait_for_one_that_failed_in_any_way(tmp_path, monkeypatch) -> None:
    def fail() -> dict:
        raise OSError("the disk is full")

    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(OSError, match="disk is full"):
        _through_file(tmp_path / "plan.json", fail)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RecipeError, match="disk is full"):
        _through_file(tmp_path / "plan.json", dict)


@pytest.mark.parametrize(
    "memory",
    [
        Memory(budget="1GB", activation_offload=True, activation_checkpointing="selective"),
        Memory(budget="1GB", activation_offload=True, activation_checkpointing=0.5),
        Memory(budget="1GB", reshard_after_forward=False),
    ],
)
def test_what_a_recipe_sets_is_asked_about_however_little_sense_it_makes(memory) -> None:
    assert combinations(digits(memory=memory), 1)


def test_a_process_in_a_group_of_ranks_says_why_it_does_not_predict() -> None:
    joined = torch.distributed.is_initialized()
    if not joined:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        outlook = forecast_of(digits())
        assert outlook is not None
        (line,) = outlook.lines()
        assert "has joined its group of ranks already" in line
        outlook.close()
    finally:
        if not joined:
            torch.distributed.destroy_process_group()
