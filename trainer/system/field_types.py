"""Check that the fields of a dataclass have the types that it declares, for recipes written in Python."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trainer.errors import RecipeError


def require_types(section: str, settings: Any) -> dict[str, Any]:
    """Reject a dataclass with a field of the wrong type, for recipes written in Python; return the types.

    Fields have plain types or classes. Messages put ``section``, such as ``"optim."``, before their names."""
    types = _field_types(settings.__class__)
    for name, hint in types.items():
        if not _matches_type(value := getattr(settings, name), hint):  # the type is described only if it does not fit
            raise RecipeError(f"{section}{name}={value!r} must be {_describe_type(hint)}")
    return types


@lru_cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, localns=dict.fromkeys(("Tensor", "ndarray"), Any))  # imported for type checkers only
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _matches_type(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_matches_type(value, member) for member in inner)
    if origin is Literal:  # the value itself is checked elsewhere, with a specific message
        return type(value) in map(type, inner)
    if origin is list:
        return isinstance(value, list | tuple) and all(_matches_type(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping)
    if isinstance(value, bool):
        return hint in (bool, Any)
    wider = {float: (int, float), str: (str, os.PathLike)}.get(hint, origin or hint)
    return wider is Any or isinstance(value, wider)


def _describe_type(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_describe_type, inner))
    if origin is Literal:
        return ", ".join(map(str, inner))
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    if origin is list:
        return f"a list, each {_describe_type(inner[0])}"
    return names.get(hint) or f"a {(origin or hint).__name__}"
