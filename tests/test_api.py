"""From a recipe to a finished run, in this process."""

from __future__ import annotations

import csv
import ctypes
import dataclasses
import gc
import json
import math

import pytest
import torch
from helpers.resumed import losses

from trainer import Memory, Optim, Recipe, RecipeError, Run
from trainer.after.predict import predict
from trainer.api import evaluate, fit
from trainer.commands.recipes import load_recipe
from trainer.data import Digits, TextFiles
from trainer.engine.cut import Cut
from trainer.engine.loop import NonFiniteError
from trainer.engine.window import Windows
from trainer.errors import RunError
from trainer.models import MLP, VisionTransformer
from trainer.run.description import padding_shares
from trainer.run.identity import with_absolute_paths
from trainer.system.status_line import say

quick = pytest.mark.usefixtures("no_pictures")


def recipe(run_dir, run=None, **changes):
    """Six steps an epoch; ``run`` are settings of that section besides."""
    values = {
        "model": VisionTransformer("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1),
        "data": Digits(val_fraction=0.1, test_fraction=0.8),
        "optim": Optim("adamw", lr=3e-3, schedule="cosine"),
        "batch_size": 64,
        "epochs": 1,
        "memory": Memory(micro_batch_size=16),
        "run": Run(**{"dir": str(run_dir), "progress": False} | (run or {})),
    }
    return Recipe(**(values | changes))


def rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run directory, its summary and its data."""
    run_dir = tmp_path_factory.mktemp("runs") / "digits"
    given = recipe(run_dir, epochs=2, eval_every=5, run={"best": "last"})
    # What earlier tests have freed must not be given back to the system in the midst of the run: its peaks would fall.
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return run_dir, fit(given, "vit_digits"), given.data


def test_the_run_directory_holds_what_was_promised(finished):
    run_dir, summary, data = finished
    files = {"recipe.yaml", "metrics.csv", "classification_report.txt", "curves.png", "memory.png"}
    files |= {"confusion.csv", "confusion.png", "errors.csv", "report.html"}
    assert {path.name for path in run_dir.iterdir()} == files | {"model", "status.json", "summary.json"}
    saved = {path.name for path in (run_dir / "model").iterdir()}
    assert saved == {"model.safetensors", "config.json", "files.json", "README.md"}
    content = json.loads((run_dir / "summary.json").read_text(), parse_constant=pytest.fail)
    expected = {"status": "finished", "steps": 12, "skipped_steps": 0, "world_size": 1}
    expected |= {"batch_size": 64, "micro_batch_size": 16, "accumulate": 4}
    assert expected.items() <= content.items()
    assert content["metrics"]["test"].keys() == {"accuracy", "loss"}
    assert content["attention"] == ["flash"]  # no dropout of attention, for which a CPU has math alone
    memory = content["memory"]
    assert {"allocated_gb", "reserved_gb", "host_peak_gb", "host_idle_gb", "phases"} < memory.keys()
    assert list(memory["phases"]) == ["init", "forward", "backward", "step", "evaluation"]
    peaks = [figures["host_gb"] for figures in memory["phases"].values()]
    assert 0.1 < memory["host_idle_gb"] <= min(peaks)
    assert max(peaks) <= memory["host_peak_gb"]
    assert content["versions"]["torch"] == torch.__version__.split("+")[0]
    assert content["samples_per_second"] == pytest.approx(2 * len(data.train) / content["seconds"])
    report = (run_dir / "classification_report.txt").read_text()
    assert f"{summary.metrics['test']['accuracy']:.4f}" in report
    assert str(len(data.test)) in report


def test_metrics_have_every_step_and_every_evaluation(finished):
    run_dir, summary, _ = finished
    found = rows(run_dir)
    assert [int(row["step"]) for row in found if row["loss"]] == list(range(1, 13))
    # Every five steps, and at the ends of both epochs, but not twice at one step.
    assert [int(row["step"]) for row in found if row["val_loss"]] == [5, 6, 10, 12]
    assert [int(row["step"]) for row in found if row["test_loss"]] == [12]
    assert float(found[-1]["test_accuracy"]) == summary.metrics["test"]["accuracy"]


@quick
def test_the_saved_recipe_gives_the_same_run_again_also_without_evaluation(finished, tmp_path):
    run_dir = finished[0]
    again, source = load_recipe(str(run_dir / "recipe.yaml"))
    assert source == "vit_digits"
    settings = Run(dir=str(tmp_path / "again"), progress=False, evaluate=False)
    summary = fit(again.replace(run=settings), source)
    assert losses(tmp_path / "again") == losses(run_dir)
    weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (run_dir, tmp_path / "again")]
    assert weights[0] == weights[1]
    assert not any(row["val_loss"] or row["test_loss"] for row in rows(tmp_path / "again"))
    assert (summary.status, summary.metrics) == ("finished", {})
    assert not (tmp_path / "again" / "classification_report.txt").exists()


@quick
def test_a_run_without_progress_is_silent_and_what_follows_it_is_not(tmp_path, capsys):
    fit(recipe(tmp_path / "silent", run={"evaluate": False, "predict": False}, max_steps=1))
    assert capsys.readouterr().out == ""
    say("read again")
    assert capsys.readouterr().out == "read again\n"


def test_the_files_are_evaluated_with_the_same_figures_and_predict_an_image(finished, tmp_path, capsys):
    from PIL import Image
    from sklearn.datasets import load_digits

    run_dir, summary, _ = finished
    saved, _ = load_recipe(str(run_dir / "recipe.yaml"))
    assert evaluate(saved, run_dir).metrics() == pytest.approx(summary.metrics["test"], rel=1e-6)
    assert "weighted avg" in capsys.readouterr().out
    Image.fromarray((load_digits().images[0] * 15).astype("uint8")).save(tmp_path / "zero.png")
    ((name, probability),) = predict(saved, run_dir, images=[str(tmp_path / "zero.png")])
    assert name in "0123456789"
    assert 0.1 <= probability <= 1
    assert capsys.readouterr().out.startswith(f"{name}\t{probability:.4f}\t")
    with pytest.raises(RecipeError, match="--text needs a text model"):
        predict(saved, run_dir, texts=["zero"])


@quick
def test_the_loss_curve_does_not_depend_on_the_cut(tmp_path):
    settings = {"model": MLP([32]), "optim": Optim("sgd", lr=0.05, momentum=0.9), "epochs": 2, "max_steps": 10}
    for micro in (64, 16, 7):
        memory = Memory(micro_batch_size=micro)
        assert fit(recipe(tmp_path / str(micro), {"evaluate": False}, memory=memory, **settings)).steps == 10
        assert losses(tmp_path / str(micro)) == pytest.approx(losses(tmp_path / "64"), rel=1e-5)


@quick
def test_a_schedule_of_accumulation_changes_the_batch_and_without_a_test_set_figures_are_of_validation(tmp_path):
    class NoTest(Digits):
        def prepare(self, tokenizer=None):
            super().prepare(tokenizer)
            self.test = None

    data, schedule = NoTest(val_fraction=0.1, test_fraction=0.8), {0: 4, 1: 1}
    memory = Memory(micro_batch_size=32)
    summary = fit(recipe(tmp_path / "r", data=data, batch_size=None, accumulate=schedule, epochs=2, memory=memory))
    assert summary.steps == math.ceil(len(data.train) / 128) + math.ceil(len(data.train) / 32)
    assert (summary.batch_size, summary.accumulate) == (128, schedule)
    assert list(summary.metrics) == ["val"]
    assert not any(row["test_loss"] for row in rows(tmp_path / "r"))


PRECISIONS = ("64-true", "bf16-mixed", "16-mixed", "bf16-true")


@pytest.mark.first(1)
@quick
@pytest.mark.parametrize("name", [*PRECISIONS, "adam", "sgd", "adafactor", "adagrad", "rmsprop"])
def test_every_precision_and_every_optimizer_trains(name, tmp_path):
    memory = Memory(micro_batch_size=32, precision=name if name in PRECISIONS else "32-true")
    lr = {"sgd": 0.1, "adafactor": 0.03}.get(name, 3e-3)
    optim = Optim("adamw" if name in PRECISIONS else name, lr=lr, weight_decay=0.01, clip_norm=1.0)
    fit(recipe(tmp_path / "r", {"evaluate": False}, memory=memory, optim=optim, epochs=2))
    curve = losses(tmp_path / "r")
    assert all(map(math.isfinite, curve))
    assert sum(curve[-3:]) < sum(curve[:3])


def test_divergence_stops_the_run_with_the_reason_and_leaves_no_model(tmp_path):
    with pytest.raises(NonFiniteError, match=r"3 steps in a row were skipped.*Lower optim\.lr"):
        fit(recipe(tmp_path / "r", {"max_skipped_steps": 3}, optim=Optim("sgd", lr=1e38)))
    content = json.loads((tmp_path / "r" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert (content["status"], content["skipped_steps"]) == ("failed", 3)
    assert not (tmp_path / "r" / "model").exists()
    assert (tmp_path / "r" / "curves.png").exists()


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ({"num_classes": 7}, {}, r"model\.num_classes=7 does not fit the data, which has 10"),
        ({"image_size": 16}, {}, r"model\.image_size=16 does not fit the data, which has 8"),
        ({}, {"accumulate": 8}, r"batch_size=64 contradicts accumulate=8"),
        (
            {},
            {"accumulate": {0: 4, 3: 2}, "epochs": 5},
            r"64 contradicts accumulate=2 with memory\.micro_batch_size=16 on 1 rank.*make 32",
        ),
        (
            {},
            {"accumulate": 40, "memory": Memory()},
            r"cannot be cut into accumulate=40 micro-batches: those of 2 .* make 32",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(model, changes, message, tmp_path):
    model = dataclasses.replace(recipe("x").model, **model)
    with pytest.raises(RecipeError, match=message):
        fit(recipe(tmp_path / "r", model=model, **changes))
    assert not (tmp_path / "r").exists()


def test_a_run_can_be_evaluated_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("text,label")
    monkeypatch.chdir(tmp_path)
    data = TextFiles("t.csv", test_file="missing.csv", val_fraction=0.1)
    kept = with_absolute_paths(recipe("x", data=data)).data
    assert (kept.train_file, kept.test_file, kept.text_column) == (str(tmp_path / "t.csv"), "missing.csv", "text")


@quick
def test_what_cannot_start_leaves_the_run_directory_free(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.report.loggers.find_spec", lambda name: None)  # wherever the tests run
    with pytest.raises(RecipeError, match="needs the package wandb"):
        fit(recipe(tmp_path / "r", {"logger": ["wandb"]}))
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"run\.dir=.*file/r cannot be made"):
        fit(recipe(tmp_path / "file" / "r"))
    assert fit(recipe(tmp_path / "r", {"evaluate": False}, max_steps=1)).status == "finished"


def test_grouping_by_length_halves_the_padding_that_is_reported():
    lengths = torch.randint(5, 200, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    cut = {"cut_at": lambda epoch: Cut(32, 4, 8), "fetch": iter, "weigh": lambda batch: {}}
    before, after = padding_shares(Windows(size=len(lengths), seed=0, lengths=lengths, **cut))
    assert after < before / 2


def test_a_working_directory_that_was_removed_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(RunError, match=r"the working directory was removed: .* absolute --run\.dir"):
        fit(recipe("run"))


def test_what_is_no_recipe_is_named_with_the_fix() -> None:
    with pytest.raises(RecipeError, match=r"not 'vit_digits': recipe, _ = trainer\.load_recipe\('vit_digits'\)"):
        fit("vit_digits")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"fit takes a Recipe, not MLP: give Recipe\("):
        fit(MLP([4]))  # type: ignore[arg-type]
