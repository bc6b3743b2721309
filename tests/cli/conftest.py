"""A recipe of the tests' own, with every kind of field, and a stand-in for training."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPE = '''
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from trainer import Data, Memory, Model, Recipe, main

if TYPE_CHECKING:
    from nowhere import Absent


@dataclass
class Net(Model):
    """A network.

    Args:
        width: features of a layer, at most 90% of them used.
    """

    width: int = 8
    kind: Literal["wide", "deep"] = "deep"
    config: dict[str, Any] | None = None
    weights: str | None = None
    sizes: tuple[int, ...] = (1, 2)
    hook: Absent | None = None
    function: Any = print

    def __post_init__(self):
        if self.width < 1:
            raise ValueError(f"width={self.width} must be at least 1")


@dataclass
class Points(Data):
    root: str = "points"
    workers: int = 0


recipe = Recipe(model=Net(), data=Points(), batch_size=64, memory=Memory(micro_batch_size=16))

if __name__ == "__main__":
    main(recipe)
'''


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "points_recipe.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the command line asks `trainer.fit` to do, instead of doing it."""
    made: list[tuple] = []
    monkeypatch.setitem(
        sys.modules,
        "trainer.api",
        SimpleNamespace(
            fit=lambda recipe, source: made.append(("fit", recipe, source)),
            evaluate=lambda recipe, run_dir, file=None: made.append(("evaluate", recipe, run_dir, file)),
        ),
    )

    def predict(recipe, run_dir, *inputs, **how):
        made.append(("predict", recipe, run_dir, *inputs, how))

    monkeypatch.setitem(sys.modules, "trainer.after.predict", SimpleNamespace(predict=predict))
    return made


@pytest.fixture
def run_dir(tmp_path: Path, recipe_file: Path) -> Path:
    """A run directory as `trainer fit` leaves it behind, with another seed than the recipe's."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(f"recipe: {recipe_file}\nseed: 7\n")
    return folder
