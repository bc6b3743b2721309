"""Where recipes are: packaged names, Python files, and the YAML files that runs write."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer.errors import RecipeError, text_of
from trainer.recipe import Recipe
from trainer.settings import change, did_you_mean

if TYPE_CHECKING:
    from trainer.commands.flags import RecipeParser


TRUST = "trust-recipe"
"""The switch that lets a YAML file lead to Python code."""


def recipes_folder() -> Path:
    """The packaged recipes: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def packaged_recipes() -> list[str]:
    """The names of the packaged recipes."""
    return sorted(path.stem for path in recipes_folder().glob("*.py") if not path.stem.startswith("_"))


def load_recipe(reference: str, *, trusted: bool = False) -> tuple[Recipe, str]:
    """The recipe that ``reference`` names, and its source: a packaged name or the absolute path of a Python file.

    Args:
        reference: a packaged name, a path to a ``.py`` file that defines ``recipe``, or a path to a ``.yaml`` file
            whose key ``recipe`` names one of these; the YAML file's other settings are then applied.
        trusted: whether a ``.py`` file that the YAML file names is executed (``--trust-recipe``). One that
            ``reference`` names itself is: nobody takes it for settings, nor for the files of a run.

    Raises:
        RecipeError: when there is no such recipe, or it does not load.
    """
    if not reference.endswith((".yaml", ".yml")):
        source = source_of(reference)
        return import_recipe(_path_of(source)), source
    from trainer.commands.flags import RecipeParser  # jsonargparse, which `trainer --help` does without
    from trainer.commands.yaml_files import load_yaml_file

    path = Path(reference)
    tree = load_yaml_file(path)
    named = yaml_source(path, tree)
    if named is None:
        raise RecipeError(
            f"{path}: the key recipe must name a packaged recipe or a .py file, to say which model and data are meant"
        )
    if os.path.isabs(named) and not trusted:
        raise RecipeError(
            f"{path}: recipe={str(tree['recipe'])!r} is Python code, {os.path.realpath(named)!r}, and is not executed: "
            f"add --{TRUST} if you trust that file"
        )
    recipe = import_recipe(_path_of(named))
    return change(recipe, yaml_changes(RecipeParser(recipe), path, tree)), named


def source_of(reference: str, folder: Path | None = None) -> str:
    """What a run's ``recipe.yaml`` calls the recipe: its packaged name, or the absolute path of its file.

    Args:
        reference: a packaged name or a path.
        folder: where a relative path starts; the working directory by default.
    """
    names = packaged_recipes()
    if reference in names:
        return reference
    path = Path(os.path.abspath((folder or Path()) / reference))
    if path.suffix != ".py":
        known = f"packaged recipes: {', '.join(names)}; or give the path of a .py or .yaml file"
        raise RecipeError(f"unknown recipe {reference!r}{did_you_mean(reference, names)} ({known})")
    if not os.path.isfile(path):  # also for a name that no file can have
        raise RecipeError(f"recipe {reference!r}: no such file")
    packaged = path.stem in names and path.samefile(recipes_folder() / path.name)
    return path.stem if packaged else str(path)


def yaml_source(path: Path, tree: Mapping[Any, Any]) -> str | None:
    """The recipe that a YAML file says it belongs to, or ``None``."""
    reference = tree.get("recipe")
    if reference is None:
        return None
    try:
        return source_of(str(reference), path.parent)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def config_changes(parser: RecipeParser, source: str, paths: Sequence[str]) -> dict[str, Any]:
    """The changes that the ``--config`` files ask for, later files over earlier ones."""
    from trainer.commands.yaml_files import load_yaml_file

    changes: dict[str, Any] = {}
    for path in map(Path, paths):
        tree = load_yaml_file(path)
        if yaml_source(path, tree) not in (None, source):
            raise RecipeError(f"{path}: recipe={tree['recipe']!r} is not the recipe asked for, {source!r}")
        changes |= yaml_changes(parser, path, tree)
    return changes


def yaml_changes(parser: RecipeParser, path: Path, tree: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings of a YAML file, without the name of its recipe; errors name the file."""
    try:
        return parser.read_yaml({key: value for key, value in tree.items() if key != "recipe"})
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def import_recipe(path: Path) -> Recipe:
    """The ``recipe`` that the Python file ``path`` defines."""
    module = _execute(path)
    recipe = getattr(module, "recipe", None)
    if recipe is None:
        raise RecipeError(f"recipe {path} defines no recipe: it needs a line `recipe = Recipe(...)`")
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"recipe {path}: recipe is a {type(recipe).__name__}, not a trainer.Recipe")
    return recipe


def _path_of(source: str) -> Path:
    return Path(source) if os.path.isabs(source) else recipes_folder() / f"{source}.py"


def _execute(path: Path) -> ModuleType:
    """Run a recipe file as ``python FILE`` would, but under a name of its own instead of ``__main__``."""
    if path.parent != recipes_folder() and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # a recipe may import what lies beside it
    name = path.stem
    while name in sys.modules:
        name += "_"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        what = text_of(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {text_of(error)}"
        raise RecipeError(f"recipe {path}{_line_of(error, path)}: {what}") from error
    return module


def _line_of(error: BaseException, path: Path) -> str:
    """Which line of the recipe file led to ``error``."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f" line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" line {lines[-1]}" if lines else ""
