"""Settings: types, YAML files, what wins over what."""

import dataclasses
import sys
from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.cli import run
from trainer.commands.classes import split_classes
from trainer.commands.flags import RecipeParser, load_yaml
from trainer.commands.recipes import load_recipe, recipes_folder
from trainer.errors import RecipeError
from trainer.models.hub import HubModel
from trainer.recipe import Memory
from trainer.settings import change, class_spec, derive_batch, dump_recipe, settings_of


def resolved(calls, *argv: object):
    """The recipe that a command line trains."""
    assert run(["fit", *map(str, argv)]) == 0
    return calls.pop()[1]


def values(recipe) -> dict:
    return {key: setting.value for key, setting in settings_of(recipe).items()}


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("accumulate", "{0: 8, 4: 2}", {0: 8, 4: 2}),
        ("accumulate", '{"0": 8}', {0: 8}),
        ("optim.lr", "1e-4", 1e-4),
        ("optim.lr", "3", 3.0),
        ("optim.clip_norm", "null", None),
        ("memory.micro_batch_size", "auto", "auto"),
        ("run.progress", "false", False),
        ("run.logger", "tensorboard", ["tensorboard"]),
        ("run.logger", "csv,tensorboard", ["csv", "tensorboard"]),
        ("run.logger", "[csv,tensorboard]", ["csv", "tensorboard"]),
        ("run.logger", "[]", []),
        ("model.weights", "123", "123"),
        ("model.weights", "{odd", "{odd"),
        ("model.sizes", "[3,4,5]", (3, 4, 5)),
        ("model.config", '{"n_layers": 2, "version": "2"}', {"n_layers": 2, "version": "2"}),
        ("model.hook", "3", 3),  # a type that exists only while type checking
        ("data.root", "a folder/b=c", "a folder/b=c"),
    ],
)
def test_a_flag_becomes_what_its_field_asks_for(recipe_file, calls, flag, text, value):
    found = values(resolved(calls, recipe_file, f"--{flag}", text))[flag]
    assert (found, type(found)) == (value, type(value))


def test_an_entry_of_a_dict_is_a_flag(recipe_file, calls):
    whole = ["--model.config", '{"n_layers": 1, "act": "gelu"}']
    changed = resolved(calls, recipe_file, *whole, "--model.config.n_layers", "2", "--model.config.dim", "8")
    assert changed.model.config == {"n_layers": 2, "act": "gelu", "dim": 8}


def test_flags_win_over_yaml_and_yaml_over_the_recipe(recipe_file, calls, tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("epochs: 5\nseed: 5\nmax_steps: 5\noptim: {lr: 5e-1, momentum: 0.5, name: sgd}\nmodel:\n")
    second.write_text("recipe: points_recipe.py\nseed: 6\nmax_steps: 6\nmodel.width: 6\naccumulate: {0: 8, 4: 2}\n")
    recipe = resolved(calls, "--config", first, recipe_file, "--max_steps", "7", "--config", second)
    assert (recipe.epochs, recipe.seed, recipe.max_steps) == (5, 6, 7)
    assert (recipe.optim.lr, recipe.optim.momentum, recipe.model.width) == (0.5, 0.5, 6)
    assert (recipe.accumulate, recipe.data.root) == ({0: 8, 4: 2}, "points")


def test_print_config_gives_the_same_recipe_back(recipe_file, calls, capsys, tmp_path):
    flags = ["--accumulate", "{0: 8, 4: 2}", "--model.weights", "1e-4", "--optim.lr", "1e-5", "--data.root", "null"]
    flags += ["--model.config", '{"act": "null", "version": "2", "rate": 1e-3}']
    flags += ["--model.sizes", "[7]", "--run.logger", "csv"]
    assert run(["fit", str(recipe_file), *flags, "--print_config"]) == 0
    assert calls == []
    text = capsys.readouterr().out
    wanted = values(resolved(calls, recipe_file, *flags))
    assert wanted["model.weights"] == "1e-4"
    assert wanted["model.config"]["version"] == "2"
    path = tmp_path / "resolved.yaml"
    path.write_text(text)
    assert values(resolved(calls, recipe_file, "--config", path)) == wanted
    assert values(resolved(calls, path, "--trust-recipe")) == wanted  # the YAML names its recipe
    recipe, source = load_recipe(str(path), trusted=True)
    assert dump_recipe(recipe, source) == text


def test_every_field_but_functions_is_written(recipe_file):
    recipe, source = load_recipe(str(recipe_file))
    tree = yaml.safe_load(dump_recipe(recipe, source))
    assert next(iter(tree)) == "recipe"
    assert set(tree) - {"recipe"} == {field.name for field in dataclasses.fields(recipe)} - {"listeners"}
    assert set(tree["memory"]) == {field.name for field in dataclasses.fields(Memory)}
    assert set(tree["model"]) == {"width", "kind", "config", "weights", "sizes", "hook"}


def test_a_yaml_recipe_must_name_its_recipe_and_a_relative_one_starts_at_its_file(recipe_file, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    path = tmp_path / "recipe.yaml"
    path.write_text("recipe: points_recipe.py\n")
    assert load_recipe(str(path), trusted=True)[1] == str(recipe_file)
    path.write_text("epochs: 3\n")
    with pytest.raises(RecipeError, match="names no recipe: add a line"):
        load_recipe(str(path))


def test_a_packaged_recipe_keeps_its_name_by_path_too():
    by_name, by_path = load_recipe("vit_digits"), load_recipe(str(recipes_folder() / "vit_digits.py"))
    assert by_name[1] == by_path[1] == "vit_digits"
    assert by_name[0] == by_path[0]


@pytest.mark.parametrize(
    ("flags", "batch_size", "accumulate", "micro_batch_size"),
    [
        ("", 64, None, 16),
        ("--accumulate 4", 64, 4, "auto"),  # the recipe's micro-batch gives way
        ("--accumulate {0: 8, 4: 2}", None, {0: 8, 4: 2}, 16),
        ("--accumulate 4 --memory.micro_batch_size 8", None, 4, 8),  # the recipe's batch gives way
        ("--accumulate 4 --memory.micro_batch_size auto", 64, 4, "auto"),
        ("--batch_size 32 --accumulate 4", 32, 4, "auto"),
        ("--batch_size 32 --accumulate 4 --memory.micro_batch_size 9", 32, 4, 9),  # a contradiction is not hidden
    ],
)
def test_what_is_asked_for_wins_over_the_recipe(recipe_file, calls, flags, batch_size, accumulate, micro_batch_size):
    words = [word.partition(" ")[::2] for word in flags.split("--")[1:]]
    recipe = resolved(calls, recipe_file, *(word for name, text in words for word in (f"--{name}", text.strip())))
    assert (recipe.batch_size, recipe.accumulate) == (batch_size, accumulate)
    assert recipe.memory.micro_batch_size == micro_batch_size


def test_flags_win_over_yaml_in_the_batch_too(recipe_file, calls, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("batch_size: 48\nmemory.micro_batch_size: 12\n")
    recipe = resolved(calls, recipe_file, "--accumulate", "6", "--config", path)
    assert (recipe.batch_size, recipe.accumulate, recipe.memory.micro_batch_size) == (48, 6, "auto")
    path.write_text("accumulate: 4\nmemory.micro_batch_size: 8\n")  # and YAML over the recipe
    recipe = resolved(calls, recipe_file, "--config", path)
    assert (recipe.batch_size, recipe.accumulate, recipe.memory.micro_batch_size) == (None, 4, 8)


@pytest.mark.parametrize(
    ("before", "asked", "giving_way"),
    [
        ((64, 4, 16), {"epochs": 3}, {}),
        ((64, 4, 16), {"batch_size": 32}, {"accumulate": None}),
        ((64, 4, 16), {"memory.micro_batch_size": 8}, {"accumulate": None}),
        ((64, 4, "auto"), {"batch_size": 32}, {}),
        ((None, 4, 16), {"memory.micro_batch_size": 8}, {}),
    ],
)
def test_what_gives_way_to_what_is_asked_for(before, asked, giving_way):
    keys = ("batch_size", "accumulate", "memory.micro_batch_size")
    assert derive_batch(dict(zip(keys, before, strict=True)), asked) == {**asked, **giving_way}


def test_other_data_take_nothing_along_that_belongs_to_the_recipes_own(calls, tmp_path, monkeypatch):
    monkeypatch.setattr(HubModel, "require_files", lambda self: None)  # its base model is not here
    (tmp_path / "own.txt").write_text("own")
    own = str(tmp_path / "own.txt")
    data = resolved(calls, "lm_chat", "--data.train_files", own, "--data.val_fraction", "0.1").data
    assert (data.name, data.config, data.test_split, data.chat_template) == (None, None, None, "chatml")
    before = load_recipe("lm_bytes")[0]
    data = resolved(calls, "lm_bytes", "--data.train_files", own).data
    assert (data.train_files, data.val_files, data.max_length) == (own, None, before.data.max_length)
    kept = before.data.val_files
    assert resolved(calls, "lm_bytes", "--data.train_files", own, "--data.val_files", kept).data.val_files == kept
    assert resolved(calls, "lm_bytes", "--data.max_length", "64").data.val_files == kept
    (tmp_path / "all.yaml").write_text(dump_recipe(before.replace(data=replace(before.data, train_files=own)), None))
    assert resolved(calls, tmp_path / "all.yaml").data.val_files == kept
    data = resolved(calls, "lm_chat", "--data.name", "nobody/has-this").data
    assert (data.name, data.config, data.test_split) == ("nobody/has-this", None, None)
    data = resolved(calls, "lm_chat", "--data.config", "all").data
    assert (data.name, data.config, data.test_split) == ("HuggingFaceTB/smoltalk", "all", "test")


def test_a_word_is_appended_to_a_list(recipe_file, calls, tmp_path):
    assert resolved(calls, recipe_file, "--run.logger+", "wandb").run.logger == ["csv", "wandb"]
    path = tmp_path / "settings.yaml"
    path.write_text("run: {logger: tensorboard}\n")
    recipe = resolved(calls, recipe_file, "--run.logger+", "wandb", "--config", path)
    assert recipe.run.logger == ["tensorboard", "wandb"]


_scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="ascii"))
)
_names = st.text("ab12e-.")
_values = st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(_names, inner), max_leaves=6)
_numbers = st.from_regex(r"\A[-+]?[0-9.]{1,4}e[-+]?[0-9]{1,2}\Z")


@pytest.mark.slow
def test_what_is_written_to_yaml_is_what_is_read(recipe_file):
    recipe = load_recipe(str(recipe_file))[0]
    parser = RecipeParser(recipe)

    @given(st.dictionaries(_names, _values | _numbers), _numbers | _names)
    @settings(max_examples=25, deadline=None)
    def there_and_back(config, weights):
        changed = change(recipe, {"model.config": config, "model.weights": weights})
        tree, classes = split_classes(load_yaml(dump_recipe(changed, None)))
        model = change(recipe, parser.read_yaml({"model": tree["model"]})).model  # the rest is the same in all examples
        assert (model.config, model.weights) == (config, weights)
        assert classes == {part: class_spec(getattr(recipe, part)) for part in ("model", "data")}

    there_and_back()


UNCERTAIN = """
from dataclasses import dataclass
from typing import Any, Callable

from trainer import Recipe
from trainer.data import Digits
from trainer.models import MLP


@dataclass
class Net(MLP):
    value: Any = None
    function: Callable | None = None
    kind: type | None = None
    several: list[Any] | None = None
    named: dict[str, Any] | str | None = None
    absent: "nowhere.Absent | None" = None


recipe = Recipe(model=Net([8]), data=Digits(), batch_size=64)
"""


@pytest.mark.parametrize("text", ["imported_by_name.Absent", "{class_path: imported_by_name.Absent}"])
def test_no_value_of_a_setting_makes_a_module_be_imported(calls, tmp_path, monkeypatch, text):
    """jsonargparse would, for a type that is a class, a function or anything."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported_by_name.py").write_text("class Absent:\n    pass\n")
    (tmp_path / "uncertain.py").write_text(UNCERTAIN)
    for key in ("value", "function", "kind", "several", "named", "absent"):
        (tmp_path / "own.yaml").write_text(f"model.{key}: {text}\n")
        for words in ([f"--model.{key}={text}"], ["--config", str(tmp_path / "own.yaml")]):
            assert run(["fit", str(tmp_path / "uncertain.py"), *words]) == 0
            model = calls.pop()[1].model
            assert yaml.safe_load(text) in (getattr(model, key), *(model.several or ()))  # the flag may be a list of it
    assert "imported_by_name" not in sys.modules
