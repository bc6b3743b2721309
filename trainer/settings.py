"""The settings of a recipe: every field of its dataclasses under a dotted name, to be listed, changed and written."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml

from trainer.errors import RecipeError
from trainer.recipe import Recipe
from trainer.system.redact import redact_value

CLASS = "class"  # the key in the sections model and data of YAML that names their class


class Setting(NamedTuple):
    """A field of a recipe: its type, its value, and the dataclass that has the field."""

    hint: Any
    value: Any
    owner: type


def settings_of(node: Any, prefix: str = "") -> dict[str, Setting]:
    """Return all fields of a dataclass that YAML can hold, by dotted name; fields of sections come last."""
    own, nested = dict[str, Setting](), dict[str, Setting]()
    declared = inspect.get_annotations(type(node))  # fields of the class itself come before inherited ones
    for field in sorted(dataclasses.fields(node), key=lambda field: field.name not in declared):
        key, value = f"{prefix}{field.name}", getattr(node, field.name)
        if _is_section(value):
            nested |= settings_of(value, f"{key}.")
        elif field.init and field.metadata.get("setting", True) and _is_plain(value):
            own[key] = Setting(_resolve(type(node), field.type), value, type(node))
    return own | nested


def change(recipe: Recipe, *levels: Mapping[str, Any]) -> Recipe:
    """Return a checked copy of ``recipe`` with the dotted changes of all levels; later levels win."""
    changes: dict[str, Any] = {}
    before = {key: setting.value for key, setting in settings_of(recipe).items()}
    for asked in levels:
        now = {**before, **changes}
        changes |= derive_batch(now, asked) | _defaults_for_other_data(recipe, now, asked) | _of_other_model(now, asked)
    return _replace(recipe, _nest(changes))


def _defaults_for_other_data(recipe: Recipe, before: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults for settings that were only set ``before`` and belong to other data, such as validation files."""
    data: Any = recipe.data
    changed = [key for key in data.belonging if asked.get(f"data.{key}") not in (None, before[f"data.{key}"])]
    left = [name for key in changed for name in data.belonging[key] if f"data.{name}" not in asked]
    return {f"data.{name}": data.__dataclass_fields__[name].default for name in left}


def _of_other_model(before: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that follow ``model.name``: a folder or a hub id also has the weights and the tokenizer."""
    name = asked.get("model.name")
    if not isinstance(name, str) or name == before.get("model.name"):
        return {}
    folder, moved = Path(name.removeprefix("file://")), {}
    if os.path.isdir(folder / "model") and not (folder / "config.json").is_file():  # a run directory
        folder, name = folder / "model", str(folder / "model")
        moved = {"model.name": name}
    has_weights = has_tokenizer = "/" in name and before.get("model.weights") is not None
    if os.path.isdir(folder):  # unlike Path.is_dir, also for an invalid name
        has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
        has_tokenizer = any(folder.glob("tokenizer*")) or any(folder.glob("vocab*"))
    follows = {"model.weights": name, "model.revision": None} if has_weights else {}
    follows |= {"model.tokenizer": None} if has_tokenizer else {}  # null takes that of the weights
    return moved | {key: value for key, value in follows.items() if key in before and key not in asked}


def derive_batch(before: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``asked``, with what it changes so that batch_size = micro_batch_size × accumulate × ranks holds.

    If all three would be fixed, one that is only set ``before`` (in the recipe file, or in YAML below a flag) is
    derived: ``accumulate`` if it is not in ``asked``, then ``memory.micro_batch_size``, then ``batch_size``, which
    comes first if ``accumulate`` is a schedule. If ``asked`` has all three, the run reports a contradiction.
    """
    derived = {"accumulate": None, "memory.micro_batch_size": "auto", "batch_size": None}
    if isinstance(asked.get("accumulate"), Mapping):  # a schedule changes the batch
        derived = {"batch_size": None, **derived}
    now = {**before, **asked}
    giving_way = [key for key in derived if key not in asked]
    if all(now[key] != free for key, free in derived.items()) and 0 < len(giving_way) < len(derived):
        return {**asked, giving_way[0]: derived[giving_way[0]]}
    return dict(asked)


def dump_recipe(recipe: Recipe, source: str | None) -> str:
    """Return ``recipe`` as YAML for ``trainer fit``: the name or path of its file, then all fields, without secrets.
    Classes of model and data that are not in that file are named. Without a file (``None``) both are."""
    # jsonargparse's dump would write the epochs of a schedule as strings: {'0': 8, '4': 2}.
    tree = {"recipe": source, **_nest({key: setting.value for key, setting in settings_of(recipe).items()})}
    for part in ("model", "data"):
        kind = type(getattr(recipe, part))
        if source is None or getattr(sys.modules.get(kind.__module__), "__file__", None) != source:
            tree[part] = {CLASS: class_spec(getattr(recipe, part)), **tree.get(part, {})}
    return dump_settings(tree)


def dump_settings(settings: Mapping[str, Any]) -> str:
    """Return dotted or nested ``settings`` as YAML, without secrets."""
    values = _nest({key: redact_value(value, key) for key, value in settings.items()})
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    """A safe dumper that also writes enums, paths, and NumPy's strings and numbers."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, value: Any) -> yaml.ScalarNode:
        return self.represent_str(value.name if isinstance(value, Enum) else str(value))


for _kind in (str, Enum, PurePath):
    _Dumper.add_multi_representer(_kind, _Dumper.represent_text)
_Dumper.add_multi_representer(float, lambda dumper, value: dumper.represent_float(float(value)))
# jsonargparse reads strings such as 1e-4 as numbers. PyYAML does not, and would write them without quotes.
_number = re.compile(r"^[-+]?[\d.]+[eE][-+]?\d+$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _number, list("-+.0123456789"))


def _is_plain(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str):
        return True  # the common case: writing all of them would take a sixth of the start of a run
    try:
        yaml.dump(value, Dumper=_Dumper)
    except yaml.representer.RepresenterError:
        return False
    return True


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def _replace(node: Any, changes: Mapping[str, Any]) -> Any:
    before = {name: getattr(node, name) for name in changes}
    values = {name: _replace(before[name], new) if _is_section(before[name]) else new for name, new in changes.items()}
    try:
        return dataclasses.replace(node, **values)
    except RecipeError:
        raise
    except ValueError as error:  # raised by a custom model or dataset that rejects a value
        raise RecipeError(f"{type(node).__name__}: {error}") from error


def class_spec(part: Any) -> str:
    """Return the name of a class for ``--model`` or ``--data``; that of a custom class includes its module."""
    kind = type(part)
    return kind.__name__ if kind.__module__.startswith("trainer.") else f"{kind.__module__}.{kind.__qualname__}"


def _is_section(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _resolve(owner: type, annotation: Any) -> Any:
    """Return the type of an ``annotation``, or ``Any`` if only type checkers import it."""
    if not isinstance(annotation, str):
        return annotation
    for base in owner.__mro__:  # the field may come from a base class in another module
        try:
            return eval(annotation, vars(sys.modules[base.__module__]))
        except Exception:  # noqa: PERF203
            continue
    return Any
