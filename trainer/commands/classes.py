"""The classes of model and data: the recipe's, or those named by ``--model CLASS`` and ``--data CLASS``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import trainer.data
import trainer.models
from trainer.commands import TRUST_RECIPE
from trainer.contract import Data, Model
from trainer.errors import RecipeError, require, suggest_name
from trainer.recipe import Recipe
from trainer.settings import CLASS, class_spec
from trainer.system.imports import import_object

SWAPPABLE_SECTIONS: dict[str, tuple[Any, type]] = {"model": (trainer.models, Model), "data": (trainer.data, Data)}
"""The sections with a choice of classes: the module of the built-in classes, and the base class of custom ones."""


def known_classes(part: str) -> dict[str, type]:
    """Return the built-in classes for the section ``part``, by name."""
    module, base = SWAPPABLE_SECTIONS[part]
    found = {name: getattr(module, name) for name in module.__all__}
    return {name: kind for name, kind in found.items() if issubclass(kind, base)}


def split_classes(tree: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, str]]:
    """Split a YAML file's settings into settings and class names, which can be written in three ways."""
    rest, classes = dict(tree), dict[str, str]()
    for part in SWAPPABLE_SECTIONS:
        section, named = rest.get(part), rest.pop(f"{part}.{CLASS}", None)
        if isinstance(section, str):
            named = rest.pop(part)
        elif isinstance(section, Mapping) and CLASS in section:
            named = section[CLASS]
            rest[part] = {key: value for key, value in section.items() if key != CLASS} or None
        if named is not None:
            classes[part] = str(named)
    return rest, classes


def with_classes(recipe: Recipe, classes: Mapping[str, str], trusted: bool) -> tuple[Recipe, dict[str, list[str]]]:
    """Return ``recipe`` with a model and data of ``classes``, and the settings that are now required.

    A class that differs from the recipe's starts at its defaults; fields without a default are required. A custom class
    is imported only if ``trusted``: always from the command line, from files with ``--trust-recipe``.
    """
    needed: dict[str, list[str]] = {}
    for part, name in classes.items():
        if name == class_spec(getattr(recipe, part)):
            continue
        kind = known_classes(part).get(name) or _import_custom_class(part, name, trusted)
        settings = [field for field in fields(kind) if field.init]
        required = [field.name for field in settings if field.default is field.default_factory is MISSING]
        recipe = recipe.replace(**{part: _placeholder_instance(kind) if required else kind()})
        needed[part] = [f"{part}.{field}" for field in required]
    return recipe, needed


def require_settings(recipe: Recipe, needed: Mapping[str, Sequence[str]], *levels: Mapping[str, Any]) -> None:
    """Raise an error for a setting required by ``with_classes`` that none of the ``levels`` of changes gives."""
    for part, key in [(part, key) for part, keys in needed.items() for key in keys]:
        missing = f"{key} is missing, and {type(getattr(recipe, part)).__name__} has no default for it"
        require(any(key in level for level in levels), f"{missing}: give --{key}")


def _placeholder_instance(kind: type) -> Any:
    """Create an uninitialised instance with default values; fields without a default are ``None`` until set."""
    blank: Any = object.__new__(kind)
    for field in fields(blank):
        made = field.default_factory() if field.default_factory is not MISSING else field.default
        object.__setattr__(blank, field.name, None if made is MISSING else made)
    return blank


def _import_custom_class(part: str, name: str, trusted: bool) -> type:
    given, (_, base), known = f"{part}.{CLASS}={name!r}", SWAPPABLE_SECTIONS[part], known_classes(part)
    module = name.rpartition(".")[0]
    nowhere = f"{given} was defined in a notebook or script, so it cannot be imported"
    require(module != "__main__", f"{nowhere}: in Python, use trainer.load(RUN_DIR, recipe)")
    if not module or not all(word.isidentifier() for word in name.split(".")):
        choices = f"{', '.join(sorted(known))}; or a custom class, as module.Class"
        raise RecipeError(f"{given} is unknown{suggest_name(name, known, 0.5)} ({choices})")
    code = f"{given} is Python code named by a file and is not imported"
    require(trusted, f"{code}: add --{TRUST_RECIPE} if you trust the file")
    kind = import_object(given, name)
    fits = isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)
    require(fits, f"{given} must be a dataclass and a trainer.{base.__name__}: see docs/your-own-model.md")
    return kind
