"""Typed values: what a flag or a YAML key says, turned into what its field's annotation asks for."""

from __future__ import annotations

import collections.abc
import re
import types
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin

from trainer.recipe import RecipeError
from trainer.yaml_text import parse_yaml

_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SEQUENCES = (list, tuple, collections.abc.Sequence)


def from_text(key: str, hint: Any, text: str) -> Any:
    """The value of a flag: ``text`` as typed on the command line."""
    if text.startswith("{") and _member(hint, _MAPPINGS) is not None:
        return from_yaml(key, hint, parse_yaml(text, f"{key}={text!r}"))
    return _convert(key, hint, text)


def from_yaml(key: str, hint: Any, value: Any) -> Any:
    """The value of a YAML key."""
    if _fits(hint, value):  # jsonargparse would read the strings in it once more: "2" as 2, "null" as nothing
        return value
    return _convert(key, hint, value)


def mapping_values(hint: Any) -> Any:
    """The type of the values when ``hint`` allows a mapping with string keys, else ``None``."""
    mapping = _member(hint, _MAPPINGS)
    arguments = get_args(mapping) or (str, Any)
    return arguments[1] if mapping is not None and arguments[0] is str else None


def describe(hint: Any) -> str:
    """A type as a person reads it: ``int|null``, ``dict[int,int]``, ``cosine|linear``."""
    if hint in (None, type(None)):
        return "null"
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if _is_union(hint):
        return "|".join(map(describe, get_args(hint)))
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    inner = ",".join("..." if argument is ... else describe(argument) for argument in get_args(hint))
    return f"{name}[{inner}]" if inner else name


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``name`` was probably meant to be; its last part alone may match."""
    wanted = name.replace("-", "_").lower()
    by_last = {full.rpartition(".")[2]: full for full in reversed(list(names))}
    last = wanted.rpartition(".")[2]
    if last in by_last:
        return by_last[last]
    if close := get_close_matches(wanted, list(by_last.values()), 1):
        return close[0]
    close = get_close_matches(last, list(by_last), 1)
    return by_last[close[0]] if close else None


def did_you_mean(suggestion: str | None) -> str:
    """The end of an error message."""
    return f"; did you mean {suggestion}?" if suggestion else ""


def _convert(key: str, hint: Any, value: Any) -> Any:
    """Let jsonargparse check ``value``, in a parser of one argument: its own messages would not name key and value."""
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:  # a type that jsonargparse does not know: whatever YAML makes of the value
        parser.add_argument("--value", type=Any)
    try:
        if isinstance(value, str):
            return parser.parse_args([f"--value={_as_list(hint, value)}"]).value
        return parser.parse_object({"value": value}).value
    except ArgumentError as error:
        raise RecipeError(_explain(key, hint, value)) from error


def _explain(key: str, hint: Any, value: Any) -> str:
    """Why ``value`` was refused, with the choice that is nearest to it."""
    choices = [choice for choice in _choices(hint) if isinstance(choice, str)]
    words = [word for word in re.findall(r"[\w.-]+", str(value)) if word not in choices]
    close = get_close_matches(words[0].lower(), choices, 1) if words else []
    suggestion = did_you_mean(close[0] if close else None)
    if get_origin(hint) is Literal:
        return f"{key}={value!r} is not one of {', '.join(map(str, get_args(hint)))}{suggestion}"
    return f"{key}={value!r} is not of type {describe(hint)}{suggestion}"


def _choices(hint: Any) -> list[Any]:
    """The values of every ``Literal`` in ``hint``."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for argument in get_args(hint) for choice in _choices(argument)]


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if _is_union(hint) else (hint,)


def _member(hint: Any, kinds: tuple[type, ...]) -> Any:
    """The first alternative of ``hint`` that is one of ``kinds``, with or without parameters, or ``None``."""
    return next((member for member in _members(hint) if (get_origin(member) or member) in kinds), None)


def _as_list(hint: Any, text: str) -> str:
    """A single word, or several with commas, where only a list can be meant: ``tensorboard`` is ``[tensorboard]``."""
    kinds = [member for member in _members(hint) if member is not type(None)]
    only_lists = len(kinds) == 1 and _member(hint, _SEQUENCES) is not None
    return f"[{text}]" if only_lists and text != "null" and not text.startswith(("[", "(")) else text


def _fits(hint: Any, value: Any) -> bool:
    """Whether ``value`` already is what ``hint`` asks for, without any conversion."""
    if hint is Any:
        return True
    if _is_union(hint):
        return any(_fits(member, value) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    arguments = get_args(hint)
    if isinstance(value, Mapping) and (get_origin(hint) or hint) is dict:
        keys, values = arguments or (Any, Any)
        return all(_fits(keys, key) and _fits(values, item) for key, item in value.items())
    if isinstance(value, list) and (get_origin(hint) or hint) is list:
        return all(_fits(arguments[0] if arguments else Any, item) for item in value)
    return type(value) is hint or (value is None and hint is None)
