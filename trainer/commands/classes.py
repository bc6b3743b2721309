"""Which classes model and data are of: the recipe's, or others that ``--model CLASS`` and ``--data CLASS`` name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import trainer.data
import trainer.models
from trainer.commands import TRUST
from trainer.contract import Data, Model
from trainer.errors import nearest, require
from trainer.recipe import Recipe
from trainer.settings import CLASS, class_of
from trainer.system.imports import imported

PARTS: dict[str, tuple[Any, type]] = {"model": (trainer.models, Model), "data": (trainer.data, Data)}
"""The sections whose class may be another, where those of this package are, and what one of anybody's own must be."""


def known_classes(part: str) -> dict[str, type]:
    """The classes of this package that the section ``part`` may be of, by their names."""
    module, base = PARTS[part]
    found = {name: getattr(module, name) for name in module.__all__}
    return {name: kind for name, kind in found.items() if issubclass(kind, base)}


def taken_from(tree: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, str]]:
    """A YAML file's settings without the classes that it names in one of three ways, and these classes."""
    rest, classes = dict(tree), dict[str, str]()
    for part in PARTS:
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
    """``recipe`` with a model and data of ``classes``, at their defaults where they are others than its own; and the
    settings that must be given then, because they have no default.

    ``trusted`` says whether a module of anybody's own is imported that a class is named in: those of the command line
    are, those of files with ``--trust-recipe``.
    """
    needed: dict[str, list[str]] = {}
    for part, name in classes.items():
        if name == class_of(getattr(recipe, part)):
            continue
        kind = known_classes(part).get(name) or _imported(part, name, trusted)
        required = [field.name for field in _init_fields(kind) if field.default is field.default_factory is MISSING]
        recipe = recipe.replace(**{part: _at_defaults(kind) if required else kind()})
        needed[part] = [f"{part}.{field}" for field in required]
    return recipe, needed


def require_given(recipe: Recipe, needed: Mapping[str, Sequence[str]], *levels: Mapping[str, Any]) -> None:
    """Refuse what ``with_classes`` says is needed where it is in none of the ``levels`` of changes."""
    for part, key in [(part, key) for part, keys in needed.items() for key in keys]:
        kind = type(getattr(recipe, part)).__name__
        why = f"{key} is missing, and {kind} has no default for it"
        require(any(key in level for level in levels), f"{why}: give --{key}")


def _init_fields(kind: Any) -> list[Any]:
    return [field for field in fields(kind) if field.init]


def _at_defaults(kind: type) -> Any:
    """One that is not made yet: its fields, those without a default null, for flags and YAML to say what they are."""
    blank: Any = object.__new__(kind)
    for field in fields(blank):
        made = field.default_factory() if field.default_factory is not MISSING else field.default
        object.__setattr__(blank, field.name, None if made is MISSING else made)
    return blank


def _imported(part: str, name: str, trusted: bool) -> type:
    given, (_, base), known = f"{part}.{CLASS}={name!r}", PARTS[part], known_classes(part)
    module = name.rpartition(".")[0]
    nowhere = f"{given} was defined in a notebook, or in a script that was run, and no file that is imported has it"
    require(module != "__main__", f"{nowhere}: in Python, say trainer.load(RUN_DIR, recipe)")
    choices = f"{', '.join(sorted(known))}; or one of your own, as module.Class"
    is_path = bool(module) and all(word.isidentifier() for word in name.split("."))
    require(is_path, f"{given} is none{nearest(name, known, 0.5)} ({choices})")
    code = f"{given} is Python code that only a file names, and is not imported: add --{TRUST} if you trust that file"
    require(trusted, code)
    kind = imported(given, name)
    fits = isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)
    require(fits, f"{given} is no dataclass that subclasses trainer.{base.__name__}: see docs/your-own-model.md")
    return kind
