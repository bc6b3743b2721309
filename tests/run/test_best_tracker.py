"""The weights of the best step are the model, training ends when none is better, and a resumed run decides alike."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LONG
from helpers.resumed import TINY, FewDigits, losses, recipe, saved
from helpers.warm import forks
from safetensors.torch import load_file
from torch import Tensor

from trainer import Checkpoint, Listener, Metric, Optim, RecipeError
from trainer.api import evaluate, fit
from trainer.cli import run as command
from trainer.commands.recipes import load_recipe
from trainer.data import Digits
from trainer.engine.events import Counters
from trainer.errors import RunError
from trainer.models import MLP, VisionTransformer
from trainer.run.best_tracker import WORST, BestTracker
from trainer.run.resume import require_same_structure
from trainer.system.files import remove

pytestmark = pytest.mark.usefixtures("no_pictures")

BEST, END = 5, 9
"""The step with the best validation accuracy, and that after which four evaluations have found no better one."""


def wild(run_dir: Path, run: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A run whose rate is too high to come to rest, evaluated after every step."""
    settings = {"model": MLP([16]), "data": FewDigits(val_fraction=0.5, test_fraction=0.94), "seed": 1, "epochs": 5}
    settings |= {"optim": Optim("sgd", lr=0.5, momentum=0.9), "eval_every": 1}
    return recipe(run_dir, run={"evaluate": True, "patience": 4} | (run or {}), **settings | changes)


def train(run_dir: Path, run: dict[str, Any] | None = None, **changes: Any) -> Any:
    fit(wild(run_dir, run, **changes))


def column(run_dir: Path, name: str) -> dict[int, float]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model/model.safetensors").read_bytes()


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-????????"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run."""
    run_dir = tmp_path_factory.mktemp("best") / "whole"
    return run_dir, fit(wild(run_dir))


def require_kept(run_dir: Path, step: int) -> None:
    """``model/`` holds the weights of the checkpoint of ``step``."""
    model = load_file(run_dir / "model/model.safetensors")
    (file,) = (run_dir / f"checkpoints/step-{step:08d}").glob("*.safetensors")
    found = {name.removeprefix("weights/"): value for name, value in load_file(file).items() if name[0] == "w"}
    assert found.keys() == model.keys()
    assert all(value.equal(model[name]) for name, value in found.items())


def test_the_best_step_is_the_model_and_training_ends_when_none_is_better(whole):
    run_dir, summary = whole
    figures = column(run_dir, "val_accuracy")
    assert max(figures, key=lambda step: figures[step]) == BEST
    expected = {"step": BEST, "figure": "val_accuracy", "best": figures[BEST], "last": figures[END]}
    assert summary.best == json.loads((run_dir / "summary.json").read_text())["best"] == expected
    assert (summary.steps, summary.status) == (END, "finished")
    require_kept(run_dir, BEST)
    given = wild(run_dir)
    assert evaluate(given, run_dir).metrics() == pytest.approx(summary.metrics["test"], rel=1e-6)
    assert column(run_dir, "test_loss") == {BEST: summary.metrics["test"]["loss"]}  # marked where the weights are of


def test_the_best_checkpoint_is_marked_and_exported(whole, tmp_path, capsys):
    assert command(["checkpoint", "list", str(whole[0])]) == 0
    marked = [line for line in capsys.readouterr().out.splitlines() if line.endswith("best")]
    assert [f"step-{BEST:08d}" in line for line in marked] == [True]
    small, run_dir = {"data": Digits(val_fraction=0.5, test_fraction=0.94), "max_steps": 4}, tmp_path / "r"
    one = {"best": "val_loss", "evaluate": True}
    summary = fit(recipe(run_dir, eval_every=3, run=one, optim=Optim("sgd", lr=3.0), **small), "vit_digits")
    assert summary.best is not None
    assert summary.best["step"] == 3
    assert command(["checkpoint", "export", str(run_dir), "--best", f"--out={tmp_path / 'copy/model'}"]) == 0
    assert weights(tmp_path / "copy") == weights(run_dir)
    assert command(["checkpoint", "export", str(run_dir), f"--out={tmp_path / 'default/model'}"]) == 0
    assert weights(tmp_path / "default") == weights(run_dir)
    assert command(["checkpoint", "export", str(run_dir), "--last", f"--out={tmp_path / 'newest/model'}"]) == 0
    assert weights(tmp_path / "newest") != weights(run_dir)
    assert command(["checkpoint", "export", str(run_dir), "--last", "--best"]) == 2
    assert "give --best or --last, not both" in capsys.readouterr().err
    shutil.rmtree(run_dir / "checkpoints/step-00000003")
    assert command(["checkpoint", "export", str(run_dir), "--best", f"--out={tmp_path / 'none'}"]) == 2
    assert "no evaluation has chosen a best checkpoint" in capsys.readouterr().err


class Killed(Listener):
    """Kills the process at a step, as nothing can be caught."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, counters: Any, result: Any) -> None:
        if counters.step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.first(1)
@pytest.mark.parametrize("at", [BEST, 8])  # before it is evaluated, and while others are waited for
def test_a_killed_run_decides_as_the_undisturbed_one(whole, tmp_path, at):
    run_dir, rest = whole[0], tmp_path / "r"
    given = wild(rest, checkpoint=Checkpoint(every=2, keep_last=1), listeners=[Killed(at)])
    process = forks.Process(target=fit, args=(given,))
    process.start()
    process.join(LONG)
    assert process.exitcode == -signal.SIGKILL
    assert checkpoints(rest)[-1] < at
    train(rest, {"resume": "auto"}, checkpoint=Checkpoint(every=2, keep_last=1))
    assert losses(rest) == losses(run_dir)
    assert weights(rest) == weights(run_dir)
    assert json.loads((rest / "summary.json").read_text())["best"] == whole[1].best
    assert checkpoints(rest) == [BEST, END]
    assert saved(rest, END) == saved(run_dir, END)


def test_a_run_that_was_killed_after_its_last_evaluation_reports_that_one_too(whole, tmp_path):
    killed = Path(shutil.copytree(whole[0], tmp_path / "r"))
    for name in ("summary.json", "model"):  # written after the last step
        remove(killed / name)
    train(killed, {"resume": "auto"})
    assert json.loads((killed / "summary.json").read_text())["best"] == whole[1].best


def test_what_goes_on_in_another_folder_or_from_an_older_checkpoint_takes_the_best_along(whole, tmp_path):
    train(tmp_path / "r", {"resume": str(whole[0] / "checkpoints/step-00000008")})
    assert checkpoints(tmp_path / "r") == [BEST, END]
    assert weights(tmp_path / "r") == weights(whole[0])
    older = Path(shutil.copytree(whole[0], tmp_path / "older"))
    calm = {"resume": str(older / "checkpoints/step-00000004"), "allow_change": ["optim"], "patience": 4}
    fit(wild(older, calm, optim=Optim("sgd", lr=0.0001, momentum=0.9)))
    best = json.loads((older / "summary.json").read_text())["best"]
    assert best["step"] == 2  # the best by then, though a better one was found after it
    require_kept(older, 2)


def test_a_best_checkpoint_that_is_damaged_is_said_and_the_last_weights_are_kept(whole, tmp_path, capsys):
    copy = Path(shutil.copytree(whole[0], tmp_path / "copy"))
    (file,) = (copy / f"checkpoints/step-{BEST:08d}").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    train(copy, {"resume": "auto"})
    said = capsys.readouterr().err
    assert f"{file} is corrupt" in said
    assert "model/ has the weights of the last step instead of the best" in said
    assert json.loads((copy / "summary.json").read_text())["best"] is None
    require_kept(copy, END)


SHARDED = {"strategy": "fsdp", "cpu_offload": "optimizer"}
WORLDS: list[dict[str, Any]] = [
    {"memory": {"strategy": "ddp"}},
    {"memory": SHARDED, "model": VisionTransformer("custom", **TINY), "optim": Optim("sgd", lr=3.0), "max_steps": 6},
]


@pytest.mark.first(1)
@pytest.mark.parametrize("changes", WORLDS)
def test_ranks_choose_alike_and_gather_the_same_weights(changes, ranks, tmp_path):
    own = {"metrics": ["f1_macro"], "best": "val_f1_macro"}
    ranks(2).run(partial(train, tmp_path / "r", own, **changes))
    best = json.loads((tmp_path / "r/summary.json").read_text())["best"]
    figures = column(tmp_path / "r", "val_f1_macro")
    assert best["best"] == max(figures.values()) == figures[best["step"]]
    assert best["step"] < max(figures)
    given = wild(tmp_path / "r", {"metrics": ["f1_macro"]}, **changes | {"memory": {}})
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert evaluate(given, tmp_path / "r").metrics() == pytest.approx(summary["metrics"]["test"], rel=1e-5)


class Count(Metric):
    """As many as there are."""

    name = "count"
    higher_is_better = False

    def compute(self, predictions: Tensor, targets: Tensor) -> float:
        return float(len(targets))


def test_of_equal_values_the_lower_loss_is_kept_and_patience_counts_them(tmp_path):
    own = {"metrics": [Count(), "mcc"], "best": "count", "patience": 4}
    summary = fit(wild(tmp_path / "r", own))
    val_losses = column(tmp_path / "r", "val_loss")
    lowest = min(val_losses, key=lambda step: val_losses[step])
    assert summary.best == {"step": lowest, "figure": "val_count", "best": 54.0, "last": 54.0}
    assert summary.steps == 5
    assert lowest != 1  # otherwise this test would not distinguish the lowest loss from the first
    assert set(summary.metrics["test"]) == {"accuracy", "loss", "count", "mcc"}
    require_kept(tmp_path / "r", lowest)


class Evaluated:
    """The metrics of an evaluation."""

    def __init__(self, **metrics: float) -> None:
        self.metrics = lambda: metrics


def test_a_saturated_metric_keeps_the_lowest_loss_then_the_later_step(tmp_path):
    tracker = BestTracker(wild(tmp_path), "val")
    for step, loss in enumerate([0.6, 0.3, 0.003, 0.003, 0.02], start=1):
        tracker.on_evaluation(Counters(step=step), Evaluated(accuracy=1.0, loss=loss))
    assert (tracker.step, tracker.best_value, tracker.since) == (4, 1.0, 4)
    resumed = BestTracker(wild(tmp_path), "val")
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    for step, loss, expected in ((6, 0.01, 4), (7, 0.002, 7)):
        resumed.on_evaluation(Counters(step=step), Evaluated(accuracy=1.0, loss=loss))
        assert resumed.step == expected


@pytest.mark.parametrize("run", [{"best": "loss", "patience": None}, {"patience": 2}, {"best": "test_mae"}], ids=str)
def test_a_test_set_does_not_choose_and_what_the_model_has_not_is_refused(run, golden, tmp_path):
    with golden.raises(RecipeError, hide=[r"(?<=choose one of ).*"]):
        fit(wild(tmp_path / "r", run, data=FewDigits(test_fraction=0.97)))


def test_a_test_set_does_not_choose_beside_a_validation_set(golden, tmp_path):
    with golden.raises(RecipeError):
        fit(wild(tmp_path, {"best": "test_loss"}))


def test_the_last_step_is_the_model_without_a_validation_set_and_where_a_recipe_says_so(tmp_path):
    data = FewDigits(test_fraction=0.97)
    assert fit(wild(tmp_path / "none", {"patience": None}, data=data, max_steps=3)).best is None
    assert fit(wild(tmp_path / "last", {"best": "last", "patience": None}, max_steps=3)).best is None
    assert checkpoints(tmp_path / "last") == [2, 3]
    told = fit(wild(tmp_path / "told", {"best": "test_loss", "patience": 1}, data=data))
    assert told.best is not None
    assert told.best["figure"] == "test_loss"
    require_kept(tmp_path / "told", told.best["step"])


class Heard(Listener):
    """Writes down what it hears, and fails if it is to."""

    def __init__(self, fails: bool = False) -> None:
        self.heard: list[Any] = []
        self.fails = fails

    def on_fit_start(self, counters: Any, total_steps: int) -> None:
        self.heard.append(("start", counters.step, total_steps))

    def on_step(self, counters: Any, result: Any) -> None:
        if self.fails and counters.step == 2:
            raise ZeroDivisionError("of mine")
        self.heard.append((counters.step, result.loss))
        counters.step = 10**6  # a copy

    def on_evaluation(self, counters: Any, result: Any) -> None:
        self.heard.append(("evaluated", counters.step, sorted(result.metrics())))

    def on_fit_end(self, counters: Any) -> None:
        self.heard.append(("end", counters.step))


def test_own_listeners_hear_everything_and_their_errors_name_them(tmp_path, golden):
    listener = Heard()
    fit(wild(tmp_path / "r", max_steps=2, listeners=[listener]))
    first, second = losses(tmp_path / "r")
    evaluated = ["accuracy", "loss"]
    heard = [("start", 0, 2), (1, first), ("evaluated", 1, evaluated), (2, second), ("evaluated", 2, evaluated)]
    assert listener.heard == [*heard, ("end", 2)]
    assert "listeners" not in (tmp_path / "r/recipe.yaml").read_text()
    with golden.raises(RunError, "fails"):
        fit(wild(tmp_path / "failed", listeners=[Heard(fails=True)]))
    with golden.raises(RecipeError, "no listener"):
        fit(wild(tmp_path / "none", listeners=[listener, 7]))


def test_evaluations_are_compared_by_accuracy_or_loss_and_one_that_is_not_finite_is_never_the_best(tmp_path):
    def score(figures: dict[str, float]) -> tuple[float, float]:
        return BestTracker(wild(tmp_path), "val").score_of(figures)

    assert score({"loss": 9.0, "accuracy": 0.5}) > score({"loss": 0.1, "accuracy": 0.4})
    assert score({"loss": 0.1}) > score({"loss": 0.2})
    for figures in ({"loss": math.nan, "accuracy": 1.0}, {"loss": math.inf}, {"loss": -math.inf}, {"loss": math.nan}):
        assert score(figures) == WORST


def test_the_figure_and_the_listener_of_the_docs_run_as_written(tmp_path, capsys):
    names: dict[str, Any] = {}
    blocks = re.findall(
        r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs/evaluation.md").read_text(), re.DOTALL
    )
    exec("\n".join(blocks), names)
    assert names["Within"]().compute(torch.tensor([0.0, 3.0]), torch.tensor([0.5, 1.0])) == 0.5
    fit(wild(tmp_path, max_steps=2, listeners=[names["Loud"]()]))
    said = capsys.readouterr().out
    assert "from step 0 to 2\n" in said
    assert "epoch 0: {'loss': " in said
    assert "2 steps, 0 of them skipped\n" in said


def test_the_state_of_older_checkpoints_is_accepted():
    """They have no loss of the best step, and no metric of the last one."""
    tracker = BestTracker(load_recipe("vit_digits")[0], "val")
    older = {"figure": "val_accuracy", "score": 0.5, "step": 3, "since": 1}
    require_same_structure(older, tracker.state_dict(), "best")
    tracker.load_state_dict(older)
    assert (tracker.step, tracker.since, tracker.best_value) == (3, 1, 0.5)
