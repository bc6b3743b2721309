"""From a recipe to a finished run, in this process."""

from __future__ import annotations

import csv
import dataclasses
import json
import math

import pytest
import torch

from trainer import Memory, Optim, Recipe, RecipeError, Run
from trainer.commands.recipes import load_recipe
from trainer.data import Digits
from trainer.engine.loop import NonFiniteError
from trainer.fit import evaluate, fit, predict
from trainer.models import MLP, VisionTransformer
from trainer.run.directory import padding_shares


def recipe(run_dir, **changes):
    values = {
        "model": VisionTransformer("custom", patch_size=4, layers=1, heads=2, width=16, mlp_width=32, dropout=0.1),
        "data": Digits(val_fraction=0.1),
        "optim": Optim("adamw", lr=3e-3, schedule="cosine"),
        "batch_size": 64,
        "epochs": 1,
        "memory": Memory(micro_batch_size=16),
        "run": Run(dir=str(run_dir), progress=False),
    }
    return Recipe(**(values | changes))


def rows(run_dir):
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def losses(run_dir):
    return [float(row["loss"]) for row in rows(run_dir) if row["loss"]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "digits"
    return run_dir, fit(recipe(run_dir, epochs=2, eval_every=10), "vit_digits")


def test_the_run_directory_holds_what_was_promised(finished):
    run_dir, summary = finished
    names = {path.name for path in run_dir.iterdir()}
    assert names == {
        "recipe.yaml",
        "metrics.csv",
        "classification_report.txt",
        "curves.png",
        "memory.png",
        "model",
        "status.json",
        "summary.json",
    }
    content = json.loads((run_dir / "summary.json").read_text(), parse_constant=pytest.fail)
    steps = 2 * math.ceil(1293 / 64)
    expected = {
        "status": "finished",
        "steps": steps,
        "skipped_steps": 0,
        "world_size": 1,
        "batch_size": 64,
        "micro_batch_size": 16,
        "accumulate": 4,
    }
    assert expected.items() <= content.items()
    assert content["metrics"]["test"].keys() == {"accuracy", "loss"}
    memory = content["memory"]
    assert {"allocated_gb", "reserved_gb", "host_peak_gb", "host_idle_gb", "phases"} < memory.keys()
    assert list(memory["phases"]) == ["init", "forward", "backward", "step", "evaluation"]
    peaks = [figures["host_gb"] for figures in memory["phases"].values()]
    assert 0.1 < memory["host_idle_gb"] <= min(peaks)
    assert max(peaks) <= memory["host_peak_gb"]
    assert content["versions"]["torch"] == torch.__version__.split("+")[0]
    assert content["samples_per_second"] == pytest.approx(2 * 1293 / content["seconds"])
    assert summary.metrics["test"]["accuracy"] > 0.15
    assert {path.name for path in (run_dir / "model").iterdir()} == {"model.safetensors", "config.json", "files.json"}
    report = (run_dir / "classification_report.txt").read_text()
    assert f"{summary.metrics['test']['accuracy']:.4f}" in report
    assert "360" in report


def test_metrics_have_every_step_and_every_evaluation(finished):
    run_dir, summary = finished
    found = rows(run_dir)
    assert [int(row["step"]) for row in found if row["loss"]] == list(range(1, summary.steps + 1))
    # Every ten steps, and at the ends of both epochs, but not twice at one step.
    assert [int(row["step"]) for row in found if row["val_loss"]] == [10, 20, 21, 30, 40, 42]
    assert [int(row["step"]) for row in found if row["test_loss"]] == [42]
    assert float(found[-1]["test_accuracy"]) == summary.metrics["test"]["accuracy"]


def test_the_saved_recipe_gives_the_same_run_again(finished, tmp_path):
    run_dir, _ = finished
    again, source = load_recipe(str(run_dir / "recipe.yaml"))
    assert source == "vit_digits"
    fit(again.replace(run=Run(dir=str(tmp_path / "again"), progress=False)), source)
    assert losses(tmp_path / "again") == losses(run_dir)


def test_evaluate_gives_the_same_figures_from_the_files(finished, capsys):
    run_dir, summary = finished
    saved, _ = load_recipe(str(run_dir / "recipe.yaml"))
    result = evaluate(saved, run_dir)
    assert result.figures() == pytest.approx(summary.metrics["test"], rel=1e-6)
    assert "weighted avg" in capsys.readouterr().out


def test_predict_reads_an_image_file(finished, tmp_path, capsys):
    from PIL import Image
    from sklearn.datasets import load_digits

    run_dir, _ = finished
    Image.fromarray((load_digits().images[0] * 15).astype("uint8")).save(tmp_path / "zero.png")
    saved, _ = load_recipe(str(run_dir / "recipe.yaml"))
    ((name, probability),) = predict(saved, run_dir, images=[str(tmp_path / "zero.png")])
    assert name in "0123456789"
    assert 0.1 <= probability <= 1
    assert capsys.readouterr().out.startswith(f"{name}\t{probability:.4f}\t")
    with pytest.raises(RecipeError, match="--text needs a text model"):
        predict(saved, run_dir, texts=["zero"])


def test_a_run_without_evaluation_trains_the_same(finished, tmp_path):
    run_dir, _ = finished
    settings = Run(dir=str(tmp_path / "run"), progress=False, evaluate=False)
    summary = fit(recipe(tmp_path / "run", epochs=2, eval_every=10, run=settings), "vit_digits")
    assert losses(tmp_path / "run") == losses(run_dir)
    assert not any(row["val_loss"] or row["test_loss"] for row in rows(tmp_path / "run"))
    assert (summary.status, summary.metrics) == ("finished", {})
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "classification_report.txt").exists()


def test_a_run_directory_is_not_overwritten(finished):
    run_dir, _ = finished
    before = (run_dir / "summary.json").read_bytes()
    with pytest.raises(RecipeError, match=r"run\.dir=.* already holds a run"):
        fit(recipe(run_dir))
    assert (run_dir / "summary.json").read_bytes() == before


def test_the_loss_curve_does_not_depend_on_the_cut(tmp_path):
    base = recipe(tmp_path / "x", model=MLP([32]), optim=Optim("sgd", lr=0.05, momentum=0.9), max_steps=25, epochs=2)
    curves = []
    for micro in (64, 16, 7):
        run_dir = tmp_path / str(micro)
        cut = base.replace(memory=Memory(micro_batch_size=micro), run=Run(dir=str(run_dir), progress=False))
        assert fit(cut).steps == 25
        curves.append(losses(run_dir))
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


def test_a_schedule_of_accumulation_changes_the_batch(tmp_path):
    memory = Memory(micro_batch_size=32)
    summary = fit(recipe(tmp_path / "r", batch_size=None, accumulate={0: 4, 1: 1}, epochs=2, memory=memory))
    assert summary.steps == math.ceil(1293 / 128) + math.ceil(1293 / 32)
    assert (summary.batch_size, summary.accumulate) == (128, {0: 4, 1: 1})


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_every_precision_trains(precision, tmp_path):
    memory = Memory(micro_batch_size=32, precision=precision)
    fit(recipe(tmp_path / "r", memory=memory, optim=Optim("adamw", lr=3e-3, clip_norm=1.0), max_steps=12))
    curve = losses(tmp_path / "r")
    assert all(map(math.isfinite, curve))
    assert sum(curve[-3:]) / 3 < sum(curve[:3]) / 3


@pytest.mark.parametrize("name", ["adam", "sgd", "adafactor", "adagrad", "rmsprop"])
def test_every_optimizer_trains(name, tmp_path):
    optim = Optim(name, lr={"sgd": 0.1, "adafactor": 0.03}.get(name, 3e-3), weight_decay=0.01)
    fit(recipe(tmp_path / "r", model=MLP([32]), optim=optim, max_steps=15))
    curve = losses(tmp_path / "r")
    assert curve[-1] < curve[0]


def test_divergence_stops_the_run_with_the_reason_and_leaves_no_model(tmp_path):
    diverging = Optim("sgd", lr=1e38)
    run = Run(dir=str(tmp_path / "r"), progress=False, max_skipped_steps=3)
    with pytest.raises(NonFiniteError, match=r"3 steps in a row were skipped.*Lower optim\.lr"):
        fit(recipe(tmp_path / "r", optim=diverging, run=run))
    content = json.loads((tmp_path / "r" / "summary.json").read_text(), parse_constant=pytest.fail)
    assert content["status"] == "failed"
    assert content["skipped_steps"] == 3
    assert not (tmp_path / "r" / "model").exists()
    assert (tmp_path / "r" / "curves.png").exists()


def test_what_the_data_knows_fills_the_model_and_must_agree(tmp_path):
    with pytest.raises(RecipeError, match=r"model\.num_classes=7 does not fit the data, which has 10"):
        fit(recipe(tmp_path / "r", model=dataclasses.replace(recipe("x").model, num_classes=7)))
    with pytest.raises(RecipeError, match=r"model\.image_size=16 does not fit the data, which has 8"):
        fit(recipe(tmp_path / "r", model=dataclasses.replace(recipe("x").model, image_size=16)))


def test_a_run_can_be_evaluated_from_another_folder(tmp_path, monkeypatch):
    from trainer.data import TextFiles
    from trainer.run.directory import with_absolute_paths

    (tmp_path / "t.csv").write_text("text,label")
    monkeypatch.chdir(tmp_path)
    data = TextFiles("t.csv", test_file="missing.csv", val_fraction=0.1)
    kept = with_absolute_paths(dataclasses.replace(recipe("x"), data=data)).data
    assert (kept.train_file, kept.test_file, kept.text_column) == (str(tmp_path / "t.csv"), "missing.csv", "text")


def test_what_cannot_start_leaves_the_run_directory_free(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.report.loggers.find_spec", lambda name: None)  # wherever the tests run
    blocked = Run(dir=str(tmp_path / "r"), progress=False, logger=["wandb"])
    with pytest.raises(RecipeError, match="needs the package wandb"):
        fit(recipe(tmp_path / "r", run=blocked))
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"run\.dir=.*file/r cannot be made"):
        fit(recipe(tmp_path / "file" / "r"))
    assert fit(recipe(tmp_path / "r", max_steps=1)).status == "finished"


def test_without_a_test_set_the_figures_are_called_validation(tmp_path):
    class NoTest(Digits):
        def prepare(self, tokenizer=None):
            super().prepare(tokenizer)
            self.test = None

    summary = fit(recipe(tmp_path / "r", data=NoTest(val_fraction=0.1), max_steps=2))
    assert list(summary.metrics) == ["val"]
    assert not any(row["test_loss"] for row in rows(tmp_path / "r"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"accumulate": 40, "memory": Memory()},
            r"cannot be cut into accumulate=40 micro-batches: those of 2 .* make 32",
        ),
        (
            {"accumulate": {0: 4, 3: 2}, "epochs": 5},
            r"batch_size=64 contradicts accumulate=2 with memory\.micro_batch_size=16 on 1 rank.*make 32",
        ),
        ({"accumulate": 8}, r"batch_size=64 contradicts accumulate=8"),
    ],
)
def test_plans_that_cannot_work_are_refused(changes, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        fit(recipe(tmp_path / "r", **changes))
    assert not (tmp_path / "r").exists()


def test_grouping_by_length_is_reported(sample_texts):
    from trainer.engine.window import Cut, Windows

    lengths = sample_texts.train.lengths
    windows = Windows(
        size=len(lengths),
        cut_at=lambda epoch: Cut(32, 4, 8),
        fetch=iter,
        weigh=lambda batch: {},
        seed=0,
        lengths=lengths,
    )
    before, after = padding_shares(windows)
    assert after < before / 2


@pytest.fixture
def sample_texts(tmp_path):
    """A thousand rows with as many words as they say."""
    from helpers.problems import tokenizer_folder
    from transformers import AutoTokenizer

    from trainer.data import TextFiles

    generator = torch.Generator().manual_seed(0)
    with open(tmp_path / "t.csv", "w") as file:
        file.write("text,label\n")
        for length in torch.randint(5, 200, (1000,), generator=generator).tolist():
            file.write(" ".join(["w5"] * length) + f",{length % 2}\n")
    data = TextFiles(str(tmp_path / "t.csv"), val_fraction=0.1, cache_dir=str(tmp_path / "cache"))
    data.prepare(AutoTokenizer.from_pretrained(tokenizer_folder()))
    return data
