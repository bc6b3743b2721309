"""Model and data of another class than the recipe's: by flag, in YAML, and in the recipe.yaml of a run."""

import sys
from pathlib import Path

import pytest
import yaml

from trainer.cli import run
from trainer.commands.recipes import load_recipe
from trainer.data import Digits, ImageFolder, TextFiles
from trainer.models import MLP

OWN = '''
from dataclasses import dataclass

from trainer import Data


@dataclass
class Rows(Data):
    """Rows of one's own.

    Args:
        place: where they are.
        size: how many of them.
    """

    place: str
    size: int = 3


class NoData:
    pass
'''


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the working directory, of which nobody knows but who names it."""
    (tmp_path / "my_rows.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    yield
    sys.modules.pop("my_rows", None)


def recipe_of(calls, *words):
    assert run(["fit", *map(str, words)]) == 0
    return calls.pop()[1]


@pytest.mark.usefixtures("own_module")  # for its working directory
def test_a_class_of_this_package_has_its_own_flags_and_defaults(recipe_file, calls, capsys):
    for place in (Path("photos", part, name) for part in ("train", "test") for name in ("cat", "dog")):
        place.mkdir(parents=True)
        (place / "1.png").touch()
    recipe = recipe_of(calls, recipe_file, "--data", "ImageFolder", "--data.root=photos", "--model=MLP", "--epochs", 3)
    assert (recipe.data, recipe.model, recipe.epochs) == (ImageFolder("photos"), MLP(), 3)
    assert recipe_of(calls, recipe_file, "--data.class", "Digits").data == Digits()
    as_it_is = recipe_of(calls, "vit_digits", "--data", "Digits", "--model", "VisionTransformer")
    assert as_it_is.model.layers == 4
    assert run(["fit", "vit_digits", "--data", "TextFiles", "--help"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "data: TextFiles: --data CLASS chooses the class: CIFAR10, Conversations, Digits, " in page
    assert "--data.train_file str the training texts: a path or file:// URL." in page
    assert "--data.test_fraction" not in page


@pytest.mark.parametrize(
    "text",
    [
        "data: TextFiles\ndata.train_file: a.csv\n",
        "data.class: TextFiles\ndata: {train_file: a.csv}\n",
        "data: {class: TextFiles, train_file: a.csv}\n",
    ],
)
def test_yaml_says_it_too_and_what_is_printed_gives_the_same_recipe_back(calls, capsys, monkeypatch, tmp_path, text):
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("text,body,label\na,b,0\nc,d,1\n")
    path, again = tmp_path / "own.yaml", tmp_path / "again.yaml"
    path.write_text(text)
    wanted = TextFiles("a.csv")
    assert recipe_of(calls, "vit_digits", "--config", path).data == wanted
    assert run(["fit", "vit_digits", "--config", str(path), "--print_config"]) == 0
    again.write_text(printed := capsys.readouterr().out)
    assert yaml.safe_load(printed)["data"]["class"] == "TextFiles"
    assert recipe_of(calls, again).data == wanted
    assert recipe_of(calls, again, "--data.text_column", "body").data == TextFiles("a.csv", text_column="body")


def test_a_class_of_ones_own_is_imported_for_a_flag_and_from_a_file_only_when_that_is_trusted(
    own_module, calls, capsys, tmp_path
):
    recipe = recipe_of(calls, "vit_digits", "--data", "my_rows.Rows", "--data.place", "here")
    assert (type(recipe.data).__name__, recipe.data.place, recipe.data.size) == ("Rows", "here", 3)
    assert run(["fit", "vit_digits", "--data", "my_rows.Rows", "--data.place", "here", "--print_config"]) == 0
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    assert run(["fit", "run.yaml"]) == 2
    refusal = "data.class='my_rows.Rows' is Python code named by a file and is not imported: add --trust-recipe"
    assert f"run.yaml: {refusal}" in capsys.readouterr().err
    assert recipe_of(calls, "run.yaml", "--trust-recipe", "--data.size", 4).data.size == 4
    assert load_recipe("run.yaml", trusted=True)[0].data.place == "here"


@pytest.mark.parametrize(
    "flags",
    [
        "--data TextFile",
        "--model mlpp",
        "--model Digits",
        "--data TextFiles",
        "--data no_such_module.Rows",
        "--data my_rows.Row",
        "--data my_rows.NoData",
        "--data Digits --data.train_file a.csv",
        "--data",
    ],
)
def test_a_class_that_cannot_be_is_one_line(own_module, calls, capsys, golden, flags):
    assert run(["fit", "vit_digits", *flags.split()]) == 2
    message = capsys.readouterr().err
    assert (message.count("\n"), calls) == (1, [])
    golden(message, hide=[r"(?<=\()[A-Z]\w+, .*(?=; or a custom)"])
