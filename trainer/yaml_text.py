"""Recipes as YAML: read strictly, written so that what is read back is the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import yaml

from trainer.recipe import RecipeError

_EXPONENT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


class _Loader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys, of which PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if (key.tag, key.value) in lines:
                first = lines[key.tag, key.value]
                raise RecipeError(f"line {line}: duplicate key {key.value}, first given on line {first}")
            lines[key.tag, key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A safe dumper whose strings :class:`_Loader` reads back as they were."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        # PyYAML escapes control characters and exotic line breaks between double quotes only, and loses them elsewhere.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_str)
for _class in (_Loader, _Dumper):
    # YAML 1.1, which PyYAML speaks, reads 1e-4 as a string; whoever writes it means the number.
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """The value that ``text`` stands for.

    Raises:
        RecipeError: naming ``where`` and the line, when it is not YAML or gives a key twice.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader: it builds plain values only
    except RecipeError as error:
        raise RecipeError(f"{where} {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise RecipeError(f"{where} line {line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {error}") from error


def format_yaml(value: Any, *, one_line: bool = False) -> str:
    """``value`` as YAML, in the order given."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=one_line, width=1000
    )
    return text.removesuffix("...\n").strip() if one_line else text


def flatten(tree: Mapping[Any, Any], sections: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of a nested mapping under their dotted names; only ``sections`` are gone into.

    A dict that is itself a value (an ``accumulate`` schedule, a model's configuration) stays whole.
    """
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in sections:
            yield key, value
        elif isinstance(value, Mapping):
            yield from flatten(value, sections, f"{key}.")
        elif value is not None:  # a section with nothing under it
            raise RecipeError(f"{key}={value!r} is a section: it must hold settings such as {key}.NAME")


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def plain(value: Any) -> Any:
    """``value`` made of what YAML has: numbers, strings, null, lists and mappings.

    Raises:
        TypeError: when it holds anything else, such as a function or a tensor.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return value.name
    for kind in (int, float, str):
        if isinstance(value, kind):  # NumPy's strings and floats are subclasses, which YAML does not know
            return kind(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    raise TypeError(f"{value!r} cannot be written to YAML")
