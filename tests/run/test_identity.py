"""Whatever is not what it was is noticed when a run is resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.resumed import TINY, recipe
from torch import nn

from trainer import Checkpoint, RecipeError
from trainer.checkpoint.manifest import Manifest
from trainer.commands.recipes import load_recipe, packaged_recipes
from trainer.data import Digits
from trainer.fit import fit
from trainer.models import MLP, VisionTransformer
from trainer.recipe import Recipe
from trainer.run.identity import IGNORED, flat_settings, require_same_run
from trainer.settings import _replace, settings_of

pytestmark = pytest.mark.usefixtures("no_pictures")


def manifest(settings: dict[str, Any], dataset: str = "d", tokenizer: str | None = "t") -> Manifest:
    return Manifest(
        run="r", step=4, epoch=0, step_in_epoch=4, seed=0, world_size=1, plan="p", recipe=settings, dataset=dataset,
        tokenizer=tokenizer, versions={}, figures=None, created="now", files={},
    )  # fmt: skip


def compare(before: Recipe, after: Recipe, allowed: list[str] | None = None) -> list[str]:
    return require_same_run(Path("c"), manifest(flat_settings(before)), origin(flat_settings(after)), allowed or [])


def origin(settings: dict[str, Any]) -> Any:
    return SimpleNamespace(recipe=settings, dataset="d", tokenizer="t", data_files={})


def other(value: Any) -> list[Any]:
    """Values of the same kind, one of which a recipe will take."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, 1]
    if isinstance(value, float):
        return [value / 2, value + 0.25, 0.25]
    if isinstance(value, str):
        return [f"{value}x", "fsdp", "full", "bf16-mixed", "linear", "parameters", "sgd", "blocks", "meta", "cpu", "1h"]
    if isinstance(value, list):
        return [[*value, "tensorboard"], [*value, "x"], [1]]
    return [1, 0.5, "x", 2, "10", "1GB", "auto", [1]]


def changed(before: Recipe, key: str) -> Recipe | None:
    """``before`` with another value of the setting ``key``; ``None`` where nothing else goes with the rest."""
    was = settings_of(before)[key].value
    for value in (value for value in other(was) if value != was):
        tree: dict[str, Any] = {}
        node = tree
        *sections, name = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
        try:
            return _replace(before, tree)
        except (ValueError, TypeError):
            continue
    return None


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_setting_that_changes_is_noticed(name):
    before = load_recipe(name)[0]
    tried, unnoticed, untried = 0, [], []
    for key in settings_of(before).keys() - {*IGNORED}:
        after = changed(before, key)
        if after is None:
            untried.append(key)
            continue
        tried += 1
        if not any(f"{key}: " in line for line in told(before, flat_settings(after))):
            unnoticed.append(key)
    assert tried > 50
    assert unnoticed == []
    for key in untried:  # no other value goes with the rest of the recipe
        assert any(f"{key}: " in line for line in told(before, flat_settings(before) | {key: "another"})), key


def told(before: Recipe, now: dict[str, Any]) -> list[str]:
    """What the person is told of the difference, refused or not."""
    try:
        return require_same_run(Path("c"), manifest(flat_settings(before)), origin(now), [])
    except RecipeError as error:
        return [str(error)]


def test_what_changes_training_is_refused_and_the_rest_is_told(tmp_path):
    before = recipe(tmp_path)
    with pytest.raises(
        RecipeError, match=r'optim\.lr: 0\.01 in the checkpoint, 0\.02 now.*--run\.allow_change \'\["opt'
    ):
        compare(before, before.replace(optim=dataclasses.replace(before.optim, lr=0.02)))
    free = before.replace(checkpoint=Checkpoint(every=7))
    assert compare(before, free) == [
        "checkpoint.every: 2 in the checkpoint, 7 now",
        "checkpoint.keep_last: 9 in the checkpoint, 2 now",
    ]


def test_a_change_is_allowed_by_its_name_or_its_section(tmp_path):
    before = recipe(tmp_path)
    after = before.replace(optim=dataclasses.replace(before.optim, lr=0.02))
    for allowed in ("optim.lr", "optim"):
        assert compare(before, after, [allowed]) == ["optim.lr: 0.01 in the checkpoint, 0.02 now"]
    with pytest.raises(RecipeError, match=r"run\.allow_change='optm\.lr' is no setting; did you mean optim\.lr\?"):
        compare(before, after, ["optm.lr"])


def test_what_the_planner_decides_may_be_decided_anew(tmp_path):
    before = recipe(tmp_path, memory={"budget": "1GB", "micro_batch_size": 4})
    planned = {"micro_batch_size": 8, "strategy": "fsdp", "reshard_after_forward": False}
    after = recipe(tmp_path, memory={"budget": "1GB", **planned})
    assert len(compare(before, after)) == 3
    with pytest.raises(RecipeError, match=r"memory\.budget: \"1GB\" in the checkpoint, null now; memory\.micro_batch"):
        compare(before, recipe(tmp_path, memory={"micro_batch_size": 8}))


def test_other_classes_of_model_and_data_are_noticed(tmp_path):
    before = recipe(tmp_path, model=MLP([8]))
    for after in (before.replace(model=Deeper([8])), before.replace(data=MoreDigits(test_fraction=0.97))):
        with pytest.raises(RecipeError, match=r"was saved by another recipe: (model|data): "):
            compare(before, after)


class Deeper(MLP):
    pass


class MoreDigits(Digits):
    pass


@dataclasses.dataclass
class Blocky(VisionTransformer):
    layers_of: Any = None


def test_what_yaml_cannot_hold_is_compared_by_name(tmp_path):
    before = recipe(tmp_path, model=Blocky("custom", **TINY, layers_of=nn.Linear))
    with pytest.raises(RecipeError, match=r'model\.layers_of: "Linear" in the checkpoint, "Conv2d" now'):
        compare(before, recipe(tmp_path, model=Blocky("custom", **TINY, layers_of=nn.Conv2d)))


@pytest.mark.parametrize("what", ["dataset", "tokenizer"])
def test_other_data_and_another_tokenizer_are_refused(what, tmp_path):
    settings = flat_settings(recipe(tmp_path))
    found = {"dataset": "d", "tokenizer": "t"} | {what: "other"}
    key = "data" if what == "dataset" else what
    with pytest.raises(RecipeError, match=f'{key}: "other" in the checkpoint, "{what[0]}" now'):
        require_same_run(Path("c"), manifest(settings, **found), origin(settings), [])
    lines = require_same_run(Path("c"), manifest(settings, **found), origin(settings), [key])
    assert len(lines) == 1


class Edited(Digits):
    """The same settings, and one pixel that is another."""

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.train.images = self.train.images.clone()
        self.train.images.view(-1)[100] += 1


Edited.__qualname__ = "Digits"


def test_one_changed_pixel_of_the_data_is_refused(tmp_path):
    fit(recipe(tmp_path / "r", max_steps=2))
    with pytest.raises(RecipeError, match=r'was saved by another recipe: data: "[0-9a-f]{12}" in the checkpoint'):
        fit(recipe(tmp_path / "r", max_steps=2, data=Edited(test_fraction=0.97), run={"resume": "auto"}))
