"""``trainer sweep``: real runs of a small recipe, some of which fail; an interrupted sweep goes on."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from tempfile import mkdtemp
from typing import Any

import pytest
from cli.supervised import fork_processes
from helpers.started import StartedRun

from trainer.cli import run
from trainer.commands.recipes import load_recipe
from trainer.data import Digits
from trainer.errors import RecipeError
from trainer.lab import sweep
from trainer.lab.find_lr import curve_of
from trainer.lab.measured_run import Trial
from trainer.lab.sweep import CrossValidation, OptunaSearch, Sweep, TrialSource, device_slots, parsed
from trainer.system.processes import trainer_command

RECIPE = """
import time
from dataclasses import dataclass

from trainer import Memory, Optim, Recipe, Run
from trainer.data import Digits
from trainer.models import MLP


@dataclass
class Fragile(MLP):
    seconds: float = 0.0

    def losses(self, module, batch):
        time.sleep(self.seconds)
        if self.hidden == [7]:
            raise ValueError("seven is too few")
        return super().losses(module, batch)


recipe = Recipe(
    model=Fragile([16]), data=Digits(val_fraction=0.5, test_fraction=0.94),
    optim=Optim("sgd", momentum=0.9), batch_size=16, max_steps=3, epochs=3, eval_every=1, memory=Memory(),
    run=Run(predict=False, progress=False),
)
"""
HUGE = int("9" * 400)
OVER = ["--over=optim.lr=1e-3..1.0", "--over=memory.micro_batch_size=4,8"]


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "fragile.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    fork_processes(monkeypatch)
    monkeypatch.setattr("trainer.lab.measured_run.POLL_INTERVAL", 0.05)


def content_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "sweep.json").read_text())


@pytest.mark.slow
def test_trials_are_compared_and_the_same_command_goes_on(recipe_file, tmp_path, capsys):
    words = ["sweep", str(recipe_file), *OVER, "--out", str(tmp_path / "s"), "--run.accelerator=cpu"]
    assert run([*words, "--trials=2", "--parallel=2"]) == 0
    told, before = capsys.readouterr().out, content_of(tmp_path / "s")
    rows = content_of(tmp_path / "s")["trials"]
    assert [row["status"] for row in rows] == ["finished"] * 2
    best = max(rows, key=lambda row: row["value"])
    assert before["figure"] == "val_accuracy"
    assert rows[before["best"] - 1]["value"] == best["value"]
    assert all(1e-3 <= row["settings"]["optim.lr"] <= 1 for row in rows)
    assert all(row["value"] == max(row["scores"]) and len(row["scores"]) == 3 for row in rows)
    command = shlex.split(before["best_command"])
    assert before["best_command"] in told
    assert run([*command[1:], "--run.dir", str(tmp_path / "again")]) == 0  # which finds the same
    again = json.loads((tmp_path / "again/summary.json").read_text())["best"]
    assert (again["best"], again["step"]) == (best["value"], best["step"])
    assert (tmp_path / f"s/trial-{before['best']:03d}/model").is_dir()
    # As if the machine had died in the second trial.
    before["trials"][1]["status"] = "running"
    (tmp_path / "s/sweep.json").write_text(json.dumps(before))
    shutil.rmtree(tmp_path / "s/trial-002")
    capsys.readouterr()
    assert run([*words, "--trials=3"]) == 0
    assert "1 of 3 trials are done" in capsys.readouterr().out
    after = content_of(tmp_path / "s")["trials"]
    kept = ("number", "settings", "status", "scores", "value", "step")
    assert [[row[key] for key in kept] for row in after[:2]] == [[row[key] for key in kept] for row in rows]
    assert [row["number"] for row in after] == [1, 2, 3]
    assert len({row["settings"]["optim.lr"] for row in after}) == 3  # not those of the earlier start again
    assert run([*words, "--trials=3", "--batch_size=8"]) == 2
    assert "holds another sweep: give the flags of that sweep, or another folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial_that_fails_is_a_row_and_ends_nothing(recipe_file, tmp_path, capsys):
    words = ["sweep", str(recipe_file), "--over=model.hidden=[7],[12]", "--trials=4", "--run.accelerator=cpu"]
    assert run([*words, "--run.best=val_loss", "--out", str(tmp_path / "s")]) == 0
    rows = content_of(tmp_path / "s")["trials"]
    found = Counter((row["settings"]["model.hidden"], row["status"]) for row in rows)
    assert set(found) == {("[7]", "failed"), ("[12]", "finished")}
    assert all("seven is too few" in row["reason"] for row in rows if row["status"] == "failed")
    assert all(row["score"] == -row["value"] for row in rows if row["status"] == "finished")
    assert "ValueError: seven is too few" in capsys.readouterr().out


DONE = {"number": 2, "settings": {"optim.lr": 0.5}, "status": "finished", "reason": None, "scores": [0.5]}
DONE |= {"score": 0.5, "figure": "val_accuracy", "value": 0.5, "step": 3, "seconds": 1.0}


class Impatient(TrialSource):
    """One trial, ended after its second evaluation."""

    def ask(self, earlier: Any, results: int, known: Any) -> tuple[Any, dict[str, Any]]:
        return None, {"optim.lr": 0.1}

    def report(self, trial: Any, score: float, number: int) -> bool:
        return number == 1


@pytest.mark.slow
def test_a_trial_that_falls_behind_is_ended(recipe_file, tmp_path, capsys):
    recipe = load_recipe(str(recipe_file))[0]
    words = [str(recipe_file), "--model.seconds=0.2", "--max_steps=200", "--epochs=200", "--run.accelerator=cpu"]
    Sweep(recipe, words, tmp_path, Impatient(), {"command": words, "over": []}).run(1, [{}])
    (row,) = content_of(tmp_path)["trials"]
    assert (row["status"], len(row["scores"])) == ("pruned", 2)
    assert row["value"] == max(row["scores"])  # of the evaluations that were looked at
    assert "trial 1/1: pruned · val_accuracy" in capsys.readouterr().out


def test_a_trial_knows_results_of_earlier_trials_and_only_settings_of_the_latest(recipe_file):
    recipe, source = load_recipe(str(recipe_file))
    found = OptunaSearch(dict([parsed(recipe, source, "optim.lr=1e-3..1.0")]), seed=0)
    rows = []
    for number in range(1, 15):
        trial, settings = found.ask(rows, number - 1, None)
        assert found.report(trial, 0.9, 0) is False
        rows.append(
            DONE | {"number": number, "settings": settings, "scores": [0.9], "score": -abs(settings["optim.lr"])}
        )
    after = found.ask(rows, 12, None)[1]
    assert found.ask(rows, 14, None)[1] != after
    running = [*rows[:12], *(row | {"status": "running", "scores": [], "score": None} for row in rows[12:])]
    assert found.ask(running, 12, None)[1] == after
    assert found.ask(rows, 12, {"optim.lr": 0.5})[1] == {"optim.lr": 0.5}
    for results, is_ended in ((4, False), (5, True)):  # the median of five
        trial, _ = found.ask(rows, results, {"optim.lr": 0.5})
        assert found.report(trial, 0.1, 0) is is_ended


def tried(out: Path) -> list[list[Any]]:
    """What the trials were, and what became of them."""
    names = ("number", "settings", "status", "scores", "value", "step")
    return [[row[name] for name in names] for row in content_of(out)["trials"]]


def train_quickly(words, run_dir, *, watch, **_):
    """In place of ``run_trial``: evaluations that depend on the settings alone, at instants that depend on nothing."""
    rate = float(next(word for word in words if word.startswith("--optim.lr=")).partition("=")[2])
    size = next(word for word in words if word.startswith("--batch_size=")).partition("=")[2]
    run_dir.mkdir(exist_ok=True)
    clock = random.Random()
    lines = ["step,val_accuracy"]
    for step in range(1, 6):
        time.sleep(clock.uniform(0, 0.008))
        if rate > 0.3:
            return Trial("failed", "it diverged", [], 0.0)
        quality = 1 / (1 + abs(math.log10(rate) + 2)) + (size == "32") / 10 + math.sin(1e4 * rate) / 10
        lines.append(f"{step},{quality * (1 if step > 1 else 0.5)}")
        (run_dir / "part").write_text("\n".join([*lines, ""]))
        (run_dir / "part").replace(run_dir / "metrics.csv")
        if clock.random() < 0.5 and (why := watch()) is not None:
            return Trial(why, None, [], 0.0)
    return Trial("finished", None, [], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "kills"), [(1, 7), pytest.param(2, 13, marks=pytest.mark.slow)])
def test_a_killed_sweep_tries_what_an_undisturbed_one_tries(recipe_file, tmp_path, monkeypatch, parallel, kills):
    monkeypatch.setattr(sweep, "run_trial", train_quickly)
    monkeypatch.setattr(Sweep, "_require_compared", lambda self: None)
    monkeypatch.setattr("trainer.system.files.sync_to_disk", lambda path: None)
    recipe, source = load_recipe(str(recipe_file))
    over = ["optim.lr=1e-4..1.0", "batch_size=16,32"]
    space = dict(parsed(recipe, source, text) for text in over)

    def search(out):
        Sweep(recipe, ["x"], out, OptunaSearch(space, 3), {"command": ["x"], "over": over}).run(18, [{}] * parallel)

    dice = random.Random(parallel)

    def until(instant, out):
        """Whether a search ends before it is killed, or interrupted."""
        child = multiprocessing.get_context("fork").Process(target=search, args=(out,))
        child.start()
        child.join(instant)
        if child.exitcode is not None:
            assert child.exitcode == 0
            return True
        os.kill(child.pid, dice.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGINT]))
        child.join()
        return False

    began = time.monotonic()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert until(None, tmp_path / name)
    expected, seconds = tried(tmp_path / "a"), (time.monotonic() - began) / 2
    assert tried(tmp_path / "b") == expected  # whichever trial ended first
    assert {status for _, _, status, *_ in expected} == {"finished", "pruned", "failed"}
    assert len({settings["optim.lr"] for _, settings, *_ in expected}) == 18
    done = 0
    while done < kills:
        out = Path(mkdtemp(dir=tmp_path))
        while not until(dice.uniform(0, 0.5 * seconds), out):
            done += 1
        assert tried(out) == expected


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [1, 2])
def test_the_killed_command_tries_what_an_undisturbed_one_tries(recipe_file, tmp_path, parallel):
    flags = ["--model.seconds=0.05", "--run.accelerator=cpu", "--checkpoint.every=1", f"--parallel={parallel}"]
    words = ["sweep", str(recipe_file), *OVER, *flags, "--trials=5"]
    assert run([*words, f"--out={tmp_path / 'undisturbed'}"]) == 0
    out, dice = tmp_path / "killed", random.Random(parallel)
    for finished in (0, 1, 2, 3, 5):
        (tmp_path / f"{finished}").mkdir()
        started = StartedRun(tmp_path / f"{finished}", trainer_command(*words, f"--out={out}"))
        try:
            if finished == 5:
                assert started.wait() == 0
                break
            assert started.until(partial(has_ended, out, finished), 120), started.text
            time.sleep(dice.uniform(0, 15))  # from imports to the end of a trial
            started.process.kill()
            started.process.wait()
            started.assert_nothing_left()
        finally:
            started.end()
    assert tried(out) == tried(tmp_path / "undisturbed")
    assert not list(out.glob("trial-*/checkpoints"))


def has_ended(out: Path, trials: int) -> bool:
    """Whether so many trials of the sweep have ended."""
    rows = content_of(out)["trials"] if (out / "sweep.json").exists() else []
    return len([row for row in rows if row["status"] != "running"]) >= trials


def test_what_a_killed_start_has_left_is_removed_but_not_behind_a_link(recipe_file, tmp_path):
    recipe, source = load_recipe(str(recipe_file))
    command = {"command": ["x"], "over": ["optim.lr=1e-3..1.0"]}
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    for folder in (out / "trial-001", elsewhere):
        (folder / "checkpoints").mkdir(parents=True)
    (out / "trial-002").symlink_to(elsewhere)
    (out / "sweep.json").write_text(json.dumps(command | {"trials": [DONE | {"number": 1}, DONE]}))
    space = dict([parsed(recipe, source, command["over"][0])])
    Sweep(recipe, ["x"], out, OptunaSearch(space, 0), command).run(2, [{}])
    assert not (out / "trial-001" / "checkpoints").exists()
    assert (elsewhere / "checkpoints").exists()


@pytest.mark.slow
def test_folds_are_validated_once_each_and_their_spread_is_told(recipe_file, tmp_path, capsys):
    splits = [Digits(val_fraction=0.2, val_fold=fold) for fold in range(5)]
    for data in splits:
        data.prepare()
    held = [data.val.rows for data in splits]
    everything = sorted([*splits[0].train.rows, *splits[0].val.rows])
    assert sorted(row for rows in held for row in rows) == everything
    counts = [Counter(map(int, data.val.labels)) for data in splits]
    assert all(
        max(count[label] for count in counts) - min(count[label] for count in counts) <= 1 for label in range(10)
    )
    words = ["sweep", str(recipe_file), "--folds=2", "--out", str(tmp_path / "s"), "--run.accelerator=cpu"]
    assert run(words) == 0
    content = content_of(tmp_path / "s")
    values = [row["value"] for row in content["trials"]]
    assert (content["mean"], content["deviation"]) == (mean(values), stdev(values))
    told = f"val_accuracy over 2 folds: {mean(values):.4f} ± {stdev(values):.4f} (mean and standard deviation)"
    assert told in capsys.readouterr().out
    assert run(words) == 0  # nothing is left to do
    assert content_of(tmp_path / "s") == content


def test_folds_without_a_finite_value_are_left_out_of_the_mean_and_counted(recipe_file, tmp_path, capsys):
    settings = [{"data.val_fraction": repr(1 / 3), "data.val_fold": str(fold)} for fold in range(3)]
    known = {"reason": None, "scores": [], "figure": "val_auroc", "step": 3, "seconds": 1.0}
    rows = [
        known | {"number": number, "settings": each, "status": "finished", "value": value, "score": value}
        for number, each, value in zip((1, 2, 3), settings, (0.5, None, 0.75), strict=True)
    ]
    rows[1] |= {"status": "failed", "reason": "no evaluation has a finite metric", "figure": None, "step": None}
    command = [str(recipe_file), "--run.accelerator=cpu"]
    (tmp_path / "sweep.json").write_text(json.dumps({"command": command, "over": [], "folds": 3, "trials": rows}))
    assert run(["sweep", *command, "--folds=3", "--out", str(tmp_path)]) == 0
    told = "val_auroc over 2 folds: 0.6250 ± 0.1768 (mean and standard deviation; left out: 1 without a finite value)"
    assert told in capsys.readouterr().out


@pytest.mark.first(7)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--over=optim.lr",
        "--over=optim.lrr=1,2",
        "--over=optim.lr=1..1",
        "--over=optim.lr=1e-3..1 --over=optim.lr=1,2",
        "--over=optim.lr=1..0.1",
        "--over=optim.schedule=cosine..linear",
        "--over=optim.schedule=cosine,cosin",
        "--over=optim.lr=-1..1",
        "--over=run.dir=a,b",
        "--over=optim.lr=1,2 --folds=3",
        "--over=optim.lr=1,2 --run.best=last",
        "--over=optim.lr=1,2 --run.dir=x",
        "--over=optim.lr=1,2 --data.val_fraction=0",
        "--over=data.val_fraction=0,0.5",
        "--folds=1",
        "--folds=2 --data.val_fold=1 --data.val_fraction=0.3",
    ],
)
def test_what_cannot_be_varied_is_refused_before_anything_runs(recipe_file, flags, golden, tmp_path, capsys):
    assert run(["sweep", str(recipe_file), f"--out={tmp_path / 's'}", *flags.split()]) == 2
    golden(capsys.readouterr().err)
    assert not list(tmp_path.glob("s/trial*"))
    assert not (tmp_path / "s/sweep.json").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"optim.lr": 7.0}},
        {"score": "best"},
        {"score": HUGE},
        {"scores": [0.5, math.nan]},
        {"value": None, "step": None},
        {"number": 3},
        {"status": "running", "settings": {"optim.lr": "fast"}},
        {"status": "running", "settings": {"optim.lr": HUGE}},
        {"scores": ["x"]},
        None,
    ],
    ids=lambda changes: str(changes).replace(str(HUGE), "HUGE"),
)
def test_a_sweep_that_somebody_has_changed_is_refused(recipe_file, tmp_path, golden, changes):
    command = {"command": ["x"], "over": ["optim.lr=1e-3..1.0"]}
    content = json.dumps(command | {"trials": [DONE | {"number": 1}, DONE | (changes or {})]})
    (tmp_path / "sweep.json").write_text(content[: None if changes else -1])
    recipe, source = load_recipe(str(recipe_file))
    space = dict([parsed(recipe, source, command["over"][0])])
    with golden.raises(RecipeError, hide=[r"(?<=Error: ).*?(?=\): restore)"]):
        Sweep(recipe, ["x"], tmp_path, OptunaSearch(space, 0), command)


def test_folds_of_another_recipe_are_refused(recipe_file, tmp_path, golden):
    recipe, _ = load_recipe(str(recipe_file))
    command = {"command": ["x"], "over": [], "folds": 2}
    running = DONE | {"number": 1, "status": "running", "settings": {"data.val_fold": 7}}
    (tmp_path / "sweep.json").write_text(json.dumps(command | {"trials": [running]}))
    with golden.raises(RecipeError):
        Sweep(recipe, ["x"], tmp_path, CrossValidation(recipe, 2), command)


def test_ranges_are_of_the_kind_of_their_setting_and_each_trial_at_once_has_a_device(recipe_file, monkeypatch):
    recipe, source = load_recipe(str(recipe_file))
    kinds = {text: parsed(recipe, source, text)[1] for text in ("optim.lr=1e-3..1", "batch_size=4..64", "seed=1..9")}
    found = [(type(kind).__name__[:3], kind.log) for kind in kinds.values()]
    assert found == [("Flo", True), ("Int", True), ("Int", False)]
    monkeypatch.setattr(sweep, "probe_machine", lambda: {"accelerator": "cuda", "devices": 2})
    assert device_slots(recipe, 2) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert device_slots(recipe, 2)[1] == {"CUDA_VISIBLE_DEVICES": "7"}
    with pytest.raises(RecipeError, match="--parallel=3 needs a GPU per run, and this machine has 2"):
        device_slots(recipe, 3)


@pytest.mark.slow
def test_a_learning_rate_is_found_where_the_loss_falls_fastest(recipe_file, tmp_path, capsys):
    flags = ["--run.accelerator=cpu", "--optim.schedule=cosine", "--run.patience=2"]
    words = ["sweep", str(recipe_file), "--find-lr", *flags]
    assert run([*words, f"--out={tmp_path / 'lr'}"]) == 0
    told = capsys.readouterr().out
    with open(tmp_path / "lr/lr.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    rates, losses = [row["lr"] for row in rows], [row["loss"] for row in rows]
    assert rates == pytest.approx([1e-7 * 1e8 ** (step / 99) for step in range(len(rates))])
    assert rows[20]["smoothed"] == pytest.approx(mean(losses[16:25]))
    found = json.loads((tmp_path / "lr/lr.json").read_text())
    assert 1e-5 < found["suggestion"] < found["least_loss_at"] < 10
    assert f"trainer fit {recipe_file} --run.accelerator=cpu --optim.schedule=cosine" in told
    assert f"--optim.lr={found['suggestion']:.1e}" in told
    assert {path.name for path in (tmp_path / "lr").iterdir()} == {"lr.csv", "lr.json", "lr.png", "run", "run.log"}
    assert run([*words, f"--out={tmp_path / 'lr'}"]) == 2
    assert "already holds a lr: choose another folder" in capsys.readouterr().err
    assert run([*words, "--trials=3"]) == 2
    assert "--find-lr is a single run: leave out --trials" in capsys.readouterr().err


def test_the_curve_of_a_range_test_ends_where_training_diverges(tmp_path):
    falling = [3 - 0.1 * step for step in range(20)]
    for losses, diverged in ((falling, False), ([*falling, math.nan, 1.0], True), ([*falling, *[50.0] * 9], True)):
        rows = [f"{10.0**-place},{loss}" for place, loss in zip(range(30, 0, -1), losses, strict=False)]
        (tmp_path / "metrics.csv").write_text("\n".join(["lr,loss", *rows, ""]))
        curve = curve_of(tmp_path)
        assert (curve.diverged, curve.losses) == (diverged, falling)
    assert curve.steepest() in curve.rates
    assert curve_of(tmp_path / "nowhere").losses == []


def test_without_optuna_the_line_that_installs_it_is_told(recipe_file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert run(["sweep", str(recipe_file), "--over=optim.lr=1e-3..1"]) == 2
    said = capsys.readouterr().err
    assert "trainer sweep needs the package optuna" in said
    assert "pip install 'exactbatch-trainer[sweep]'" in said
