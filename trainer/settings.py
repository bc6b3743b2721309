"""The settings of a recipe: every field of its dataclasses under a dotted name, to be listed, changed and written."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.recipe import Recipe, RecipeError
from trainer.values import did_you_mean, from_text, from_yaml, mapping_values, nearest
from trainer.yaml_text import flatten, format_yaml, nest, parse_yaml, plain

_Node = TypeVar("_Node")


@dataclass(frozen=True)
class Setting:
    """One field of a recipe.

    Args:
        key: its dotted name, as in ``memory.precision``.
        hint: its type.
        value: what it is now.
        owner: the dataclass that has the field.
    """

    key: str
    hint: Any
    value: Any
    owner: type


def settings_of(node: Any, prefix: str = "") -> dict[str, Setting]:
    """Every field of a dataclass that can be written down, those of nested dataclasses under ``section.name``.

    Fields that hold anything else (a function, a list of classes) stay what the recipe file says.
    """
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(node) if _is_section(node) else ():
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        if _is_section(value):
            found |= settings_of(value, f"{key}.")
        elif field.init and _is_plain(value):
            found[key] = Setting(key, _resolve(type(node), field.type), value, type(node))
    return found


def read_flags(recipe: Recipe, flags: Iterable[tuple[str, str | None]], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` with those that the command line's ``(name, text)`` pairs ask for on top."""
    known = settings_of(recipe)
    changes = dict(changes)
    for name, text in flags:
        if name in known:
            changes[name] = from_text(name, known[name].hint, _given(name, text))
            continue
        owner, _, entry = name.rpartition(".")
        values = mapping_values(known[owner].hint) if owner in known and entry else None
        if values is None:
            suggestion = nearest(name, known)
            hint = did_you_mean(f"--{suggestion}") if suggestion else "; --help lists all flags"
            raise RecipeError(f"unknown flag --{name}{'' if text is None else f' (value {text!r})'}{hint}")
        before = changes.get(owner, known[owner].value) or {}
        changes[owner] = {**before, entry: from_text(name, values, _given(name, text))}
    return changes


def read_yaml(recipe: Recipe, tree: Mapping[Any, Any]) -> dict[str, Any]:
    """The changes that a YAML file asks for."""
    known = settings_of(recipe)
    sections = {key[:at] for key in known for at, letter in enumerate(key) if letter == "."}
    changes: dict[str, Any] = {}
    for key, value in flatten(tree, sections):
        if key not in known:
            raise RecipeError(f"unknown key {key}{did_you_mean(nearest(key, known))}")
        if key in changes:
            raise RecipeError(f"duplicate key {key}: given both nested and with a dot")
        changes[key] = from_yaml(key, known[key].hint, value)
    return changes


def load_yaml_file(path: Path) -> dict[Any, Any]:
    """The settings in a YAML file, nested as they are written.

    Raises:
        RecipeError: naming the file, when it is missing, not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from error
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} must hold a mapping of settings, not a {type(tree).__name__}")
    return tree


def change(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy of ``recipe`` with the dotted ``changes`` made and everything checked anew."""
    return _replace(recipe, nest(derive_batch(recipe, changes)))


def derive_batch(recipe: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Let what was asked for (``changes``) win over what only the recipe file says.

    batch_size = micro_batch_size × accumulate × ranks, so an ``accumulate`` that is asked for leaves one of the other
    two to be derived; unless ``batch_size`` is asked for too: then nothing is touched, and a contradiction is an error.

    - with a number for ``memory.micro_batch_size`` asked for, ``batch_size`` follows from both;
    - otherwise the recipe's ``batch_size`` stays the setting, and ``memory.micro_batch_size`` follows.
    """
    changes = dict(changes)
    if changes.get("accumulate") is None or "batch_size" in changes or recipe.batch_size is None:
        return changes
    if "memory.micro_batch_size" not in changes:
        changes["memory.micro_batch_size"] = "auto"
    elif changes["memory.micro_batch_size"] != "auto":
        changes["batch_size"] = None
    return changes


def dump_recipe(recipe: Recipe, source: str | None) -> str:
    """``recipe`` as YAML: the name or path of its file first, then every field; ``trainer fit`` reads it back.

    Without a file (``None``) the YAML is a record only: the classes of model and data are not in it.
    """
    fields = {key: plain(setting.value) for key, setting in settings_of(recipe).items()}
    return format_yaml({"recipe": source, **nest(fields)})


def _given(name: str, text: str | None) -> str:
    if text is None:
        raise RecipeError(f"flag --{name} needs a value")
    return text


def _replace(node: _Node, changes: Mapping[str, Any]) -> _Node:
    """``dataclasses.replace`` that goes into sections."""
    values = {}
    for name, value in changes.items():
        before = getattr(node, name)
        values[name] = _replace(before, value) if _is_section(before) else value
    try:
        return dataclasses.replace(node, **values)  # type: ignore[type-var]
    except RecipeError:
        raise
    except ValueError as error:  # how a model or dataset of one's own refuses a value
        raise RecipeError(f"{type(node).__name__}: {error}") from error


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_plain(value: Any) -> bool:
    try:
        plain(value)
    except TypeError:
        return False
    return True


def _resolve(owner: type, annotation: Any) -> Any:
    """The type that a field's ``annotation`` names; ``Any`` for one that exists only while type checking.

    ``typing.get_type_hints`` would give up on the whole class for one such name.
    """
    if not isinstance(annotation, str):
        return annotation
    for base in owner.__mro__:  # the field may come from a base class in another module
        try:
            return eval(annotation, vars(sys.modules[base.__module__]))
        except Exception:  # noqa: PERF203
            continue
    return Any
