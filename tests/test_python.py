"""A run in Python: what fit returns, what load finds again, and where there is no script, as in a notebook."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.warm import python
from safetensors.torch import load_file

import trainer
from trainer import Memory, Optim, Recipe, RecipeError, Run, fit, load
from trainer.cli import run as command
from trainer.commands.recipes import load_recipe
from trainer.data import Digits
from trainer.models import MLP
from trainer.run.notebook import fit_in_subprocess

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
pytestmark = pytest.mark.usefixtures("no_pictures")


@dataclass
class Narrow(MLP):
    """A class of this module's own."""

    width: int = 4

    def build(self):
        return super().build()


def recipe(run_dir, model=None, **changes):
    values = {"data": Digits(test_fraction=0.8), "optim": Optim("sgd", lr=0.1), "batch_size": 64, "max_steps": 2}
    settings = Run(dir=str(run_dir), progress=False, predict=False)
    return Recipe(**({"model": model or MLP(hidden=[8]), "memory": Memory(), "run": settings} | values | changes))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return fit(recipe(tmp_path_factory.mktemp("python") / "run"))


@pytest.fixture
def digit(tmp_path):
    from PIL import Image

    path = tmp_path / "digit.png"
    Image.new("L", (8, 8), 100).save(path)
    return str(path)


def test_a_run_has_its_model_its_figures_and_what_predicts(finished, digit, capsys):
    assert not finished.model.training
    saved = load_file(finished.dir / "model" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in finished.model.state_dict().items())
    written = json.loads((finished.dir / "summary.json").read_text())
    assert (finished.metrics, finished.steps) == (written["metrics"], 2)
    assert finished.summary.to_json() == (finished.dir / "summary.json").read_text()
    ((label, probability),) = finished.predict(images=[digit])
    assert capsys.readouterr().out == ""
    assert trainer.predict(finished.recipe, finished.dir, images=[digit]) == [(label, probability)]
    assert capsys.readouterr().out == f"{label}\t{probability:.4f}\t{digit}\n"
    assert math.isclose(finished.evaluate().loss, finished.metrics["test"]["loss"], rel_tol=1e-6)
    with pytest.raises(AttributeError, match="stps"):
        _ = finished.stps


def test_the_open_fields_of_a_recipe_are_those_of_the_saved_model(finished, digit):
    """Also as it was before the run: no number of classes, no image size."""
    before = recipe("unused")
    assert before.model.num_classes is None
    assert trainer.predict(before, finished.dir, images=[digit]) == finished.predict(images=[digit])
    assert load(finished.dir, before).model.state_dict().keys() == finished.model.state_dict().keys()


def test_a_run_that_was_made_in_python_is_like_any_other(finished, digit, tmp_path, capsys):
    found = load(finished.dir)
    assert (type(found.recipe.model), type(found.recipe.data), found.recipe.max_steps) == (MLP, Digits, 2)
    assert found.predict(images=[digit]) == finished.predict(images=[digit])
    assert command(["predict", str(finished.dir), "--image", digit]) == 0
    assert command(["evaluate", str(finished.dir)]) == 0
    again = ["fit", str(finished.dir / "recipe.yaml"), "--run.dir", str(tmp_path / "again"), "--max_steps", "1"]
    assert command(again) == 0, capsys.readouterr().err
    assert load(tmp_path / "again").steps == 1


def test_a_file_that_names_no_recipe_names_both_classes_and_the_batch(tmp_path):
    path = tmp_path / "recipe.yaml"
    for text, missing in (
        ("model: {class: MLP}\nbatch_size: 4\n", "model.class and data.class"),
        ("model: {class: MLP}\ndata: {class: Digits}\n", "batch_size is missing"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=missing):
            load_recipe(str(path))
    path.write_text("model: {class: MLP, hidden: [8]}\ndata: {class: Digits}\nbatch_size: 4\n")
    found, source = load_recipe(str(path))
    assert (found.model, found.batch_size, source) == (MLP(hidden=[8]), 4, None)


def test_a_class_of_ones_own_is_imported_when_that_is_trusted_or_comes_with_the_recipe(tmp_path, monkeypatch):
    fit(own := recipe(tmp_path / "own", Narrow(hidden=[8])))
    with pytest.raises(RecipeError, match=r"test_python\.Narrow.* --trust-recipe"):
        load(tmp_path / "own")
    given, trusted = load(tmp_path / "own", own), load(tmp_path / "own", trusted=True)
    weights = trusted.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in given.model.state_dict().items())
    with pytest.raises(RecipeError, match="listeners is not a plain value"):
        fit_in_subprocess(own.replace(listeners=[trainer.Listener()]))
    monkeypatch.setattr(Narrow, "__module__", "__main__")
    with pytest.raises(RecipeError, match=r"Narrow is defined in the notebook, .* put it into a \.py file"):
        fit_in_subprocess(own)
    file = tmp_path / "own" / "recipe.yaml"
    file.write_text(file.read_text().replace(f"{__name__}.Narrow", "__main__.Narrow"))
    with pytest.raises(RecipeError, match=r"load\(RUN_DIR, recipe\)"):
        load(tmp_path / "own", trusted=True)


def test_what_is_no_finished_run_is_refused_by_name(tmp_path, finished):
    with pytest.raises(RecipeError, match=r"nowhere.*no such directory"):
        load(tmp_path / "nowhere")
    (tmp_path / "summary.json").write_text('{"steps": 3}')
    with pytest.raises(RecipeError, match=r"summary\.json is not the summary of a run"):
        _ = trainer.FinishedRun(finished.recipe, tmp_path).metrics


@pytest.mark.slow
def test_the_notebook_runs_as_written(tmp_path):
    """Cell by cell, in a Python without a script, as a kernel is; several runs in it, one of which is refused."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code += "\nfrom trainer.run.notebook import is_interactive\n"
    code += "assert is_interactive() and result.accuracy == fitted.metrics['test']['accuracy'] > 0.8\n"
    code += "assert len({fitted.dir, *(other.dir for other in runs.values())}) == 3\n"
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "refused: batch_size=64 contradicts accumulate=3" in done.stdout
    assert "\r" not in done.stderr


RANKS = """
from trainer import Optim, Recipe, RecipeError, Run, fit
from trainer.data import Digits
from trainer.models import MLP

def recipe(name, **run):
    settings = Run(dir=name, **run)
    return Recipe(model=MLP(hidden=[8]), data=Digits(), optim=Optim("sgd"), batch_size=64, max_steps=2, run=settings)

one, two = fit(recipe("one")), fit(recipe("two", devices=2))
assert (one.world_size, two.world_size) == (1, 2)
assert abs(two.evaluate().loss - one.metrics["test"]["loss"]) < 1e-5
try:
    fit(recipe("two", devices=2))
except RecipeError as error:
    print("refused:", error)
"""


@pytest.mark.slow
def test_several_ranks_without_a_script_are_processes_of_their_own(tmp_path):
    done = python("-c", RANKS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 node" in done.stdout
    assert "refused: run.dir=" in done.stdout
    assert "already holds a run" in done.stdout
