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
from trainer.api import fit
from trainer.checkpoint.manifest import Manifest
from trainer.commands.recipes import load_recipe
from trainer.data import Digits
from trainer.models import MLP, VisionTransformer
from trainer.recipe import Recipe
from trainer.run.identity import IGNORED, default_settings, flat_settings, require_same_run
from trainer.settings import _replace, settings_of

pytestmark = pytest.mark.usefixtures("no_pictures")


def compare(before: Recipe, now: Recipe | dict, allowed: tuple[str, ...] = (), **found: Any) -> list[str]:
    """The differences between a checkpoint, with what is ``found`` in its manifest, and today."""
    facts = {"run": "r", "step": 4, "epoch": 0, "step_in_epoch": 4, "seed": 0, "world_size": 1, "plan": "p"}
    facts |= {"versions": {}, "figures": None, "created": "now", "files": {}, "dataset": "d", "tokenizer": "t"}
    facts["recipe"] = found.pop("recipe", None) or flat_settings(before)
    manifest = Manifest(**facts | found)
    settings = flat_settings(now) if isinstance(now, Recipe) else now
    defaults = default_settings(now if isinstance(now, Recipe) else before)
    origin: Any = SimpleNamespace(
        recipe=settings, defaults=defaults, dataset="d", tokenizer="t", data_files={}, base={}
    )
    return require_same_run(Path("c"), manifest, origin, list(allowed))


def told(before: Recipe, now: Recipe | dict[str, Any], **found: Any) -> str:
    """The message on the difference, refused or not."""
    try:
        return "\n".join(compare(before, now, **found))
    except RecipeError as error:
        return str(error)


WORDS = ["fsdp", "full", "bf16-mixed", "linear", "parameters", "sgd", "blocks", "meta", "cpu", "1h"]


def other(value: Any) -> list[Any]:
    """Values of the same kind, one of which a recipe will take."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2, value / 2, value + 0.25, 1, 0.25]
    if isinstance(value, str):
        return [f"{value}x", *WORDS]
    if isinstance(value, list):
        return [[*value, "tensorboard"], [*value, "x"], [1]]
    return [1, 0.5, "x", 2, "10", "1GB", "auto", [1]]


def changed(before: Recipe, key: str) -> Recipe | None:
    """``before`` with another value of the setting ``key``; ``None`` where nothing else goes with the rest."""
    was = settings_of(before)[key].value
    for value in (value for value in other(was) if value != was):
        tree: Any = value
        for name in reversed(key.split(".")):
            tree = {name: tree}
        try:
            return _replace(before, tree)
        except (ValueError, TypeError):
            continue
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_digits", "distilbert_streaming"])
def test_every_setting_that_changes_is_noticed(name):
    before = load_recipe(name)[0]
    settings, tried, unnoticed = flat_settings(before), 0, []
    for key in settings_of(before).keys() - {*IGNORED}:
        after = changed(before, key)
        tried += after is not None
        # Where no other value goes with the rest of the recipe, what a checkpoint of another version might hold.
        if f"{key}: " not in told(before, settings | {key: "another"} if after is None else after, recipe=settings):
            unnoticed.append(key)
    assert tried > 50
    assert unnoticed == []


def test_what_changes_training_is_refused_unless_allowed_and_the_rest_is_told(tmp_path, golden):
    before = recipe(tmp_path)
    after = before.replace(optim=dataclasses.replace(before.optim, lr=0.02))
    with golden.raises(RecipeError, "changed"):
        compare(before, after)
    for allowed in ("optim.lr", "optim"):
        assert compare(before, after, (allowed,)) == ["optim.lr: 0.01 in the checkpoint, 0.02 now"]
    with pytest.raises(RecipeError, match=r"""allow it with --run\.allow_change '\["batch_size", "optim\.lr"\]'"""):
        compare(before, after, ("batch_size",))
    with golden.raises(RecipeError, "misspelt"):
        compare(before, after, ("optm.lr",))
    golden("\n".join(compare(before, before.replace(checkpoint=Checkpoint(every=7)))), "told")


def test_a_setting_that_is_younger_than_the_checkpoint_counts_as_its_default(tmp_path, golden):
    now = recipe(tmp_path)
    younger = ("memory.init", "memory.matmul_precision", "optim.momentum", "run.deterministic")
    older = {key: value for key, value in flat_settings(now).items() if key not in younger}
    assert compare(now, now, recipe=older) == []
    changed = now.replace(memory=dataclasses.replace(now.memory, init="meta"))
    with golden.raises(RecipeError, "another value"):
        compare(now, changed, recipe=older)
    del older["optim.lr"]
    with golden.raises(RecipeError, "another default"):
        compare(now, now, recipe=older)


def test_what_the_planner_decides_may_be_decided_anew(tmp_path, golden):
    before = recipe(tmp_path, memory={"budget": "1GB", "micro_batch_size": 4})
    planned = {"micro_batch_size": 8, "strategy": "fsdp", "reshard_after_forward": False}
    assert len(compare(before, recipe(tmp_path, memory={"budget": "1GB", **planned}))) == 3
    with golden.raises(RecipeError):
        compare(before, recipe(tmp_path, memory={"micro_batch_size": 8}))


class Deeper(MLP):
    pass


class MoreDigits(Digits):
    pass


@dataclasses.dataclass
class Blocky(VisionTransformer):
    layers_of: Any = None


def test_other_classes_are_noticed_and_what_yaml_cannot_hold_is_compared_by_name(tmp_path):
    before = recipe(tmp_path, model=MLP([8]))
    for after in (before.replace(model=Deeper([8])), before.replace(data=MoreDigits(test_fraction=0.97))):
        with pytest.raises(RecipeError, match=r"was saved with a different recipe: (model|data): "):
            compare(before, after)
    linear, convolution = (
        recipe(tmp_path, model=Blocky("custom", **TINY, layers_of=kind)) for kind in (nn.Linear, nn.Conv2d)
    )
    with pytest.raises(RecipeError, match=r'model\.layers_of: "Linear" in the checkpoint, "Conv2d" now'):
        compare(linear, convolution)


@pytest.mark.parametrize(("what", "key"), [("dataset", "data"), ("tokenizer", "tokenizer")])
def test_other_data_and_another_tokenizer_are_refused(what, key, tmp_path):
    same, found = recipe(tmp_path), {what: "other"}
    with pytest.raises(RecipeError, match=f'{key}: "other" in the checkpoint, "{what[0]}" now'):
        compare(same, same, **found)
    assert len(compare(same, same, (key,), **found)) == 1


class Edited(Digits):
    """The same settings, and one pixel that is another."""

    def prepare(self, tokenizer: Any = None) -> None:
        super().prepare(tokenizer)
        self.train.images = self.train.images.clone()
        self.train.images.view(-1)[100] += 1


Edited.__qualname__ = "Digits"


def test_one_changed_pixel_of_the_data_is_refused(tmp_path):
    fit(recipe(tmp_path / "r", max_steps=2))
    with pytest.raises(RecipeError, match=r'was saved with a different recipe: data: "[0-9a-f]{12}" in the checkpoint'):
        fit(recipe(tmp_path / "r", max_steps=2, data=Edited(test_fraction=0.97), run={"resume": "auto"}))
