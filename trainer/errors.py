"""Errors of settings and of runs: one line that names the cause and the fix."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

EXIT_REQUEUE = 75  # exit code of a run that was asked to stop and can be resumed (EX_TEMPFAIL)

MAX_LISTED_ITEMS = 8
MAX_COUNT = 10**15  # limit of every count: floats represent it exactly, and its products fit into about 64 bits


class RecipeError(ValueError):
    """A setting that cannot work. The message names the key, the value and the fix."""

    is_reported = False  # whether this process must not print it again


class MissingArgumentError(RecipeError):
    """A command lacks its required argument."""


class RunError(RuntimeError):
    """A run that failed. The message names its position and the fix."""


class RunStoppedError(RunError):
    """A run that was asked to stop and saved a checkpoint to resume from. Its exit code is ``EXIT_REQUEUE``."""


class EvaluationInterruptedError(RunError):
    """An evaluation that all ranks ended because one of them was asked to stop. Nothing is saved yet."""


def safe_message(error: BaseException) -> str:
    """Return ``str(error)``, or a placeholder if that raises."""
    try:
        return str(error)
    except Exception as fault:
        return f"its message cannot be created ({type(fault).__name__})"


def format_list(indices: Sequence[int | str]) -> str:
    """Return the first few of ``indices`` or names as text, such as ``4, 17, 23, …``."""
    shown = ", ".join(map(str, indices[:MAX_LISTED_ITEMS]))
    return f"{shown}, …" if len(indices) > MAX_LISTED_ITEMS else shown


def suggest_name(word: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """Return "; did you mean NAME?" with the ``known`` name most similar to ``word``, or "" if none is similar."""
    return "".join(f"; did you mean {prefix}{name}?" for name in closest_names(word, known, cutoff))


def closest_names(word: str, known: Iterable[str], cutoff: float = 0.6, count: int = 1) -> list[str]:
    """Return up to ``count`` names with at least the similarity ``cutoff``, from 0 to 1, ignoring case."""
    names = {name.lower(): name for name in reversed(list(known))}  # the first of equal names wins
    return [names[one] for one in get_close_matches(word.lower(), names, count, cutoff)]


def deprecated(name: str, replacement: str) -> None:
    """Warn the caller of the function that calls this: ``name`` works for one more release."""
    warnings.warn(f"{name} is deprecated and will be removed: use {replacement}", DeprecationWarning, stacklevel=3)


def require(condition: bool, message: str) -> None:
    """Raise :class:`RecipeError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise RecipeError(message)


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


def require_choice(key: str, value: Any, choices: Any) -> None:
    """Reject a ``value`` that is not one of the ``Literal`` type ``choices``; for recipes written in Python."""
    require(value in get_args(choices), f"{key}={value!r} is not one of {', '.join(map(str, get_args(choices)))}")


def require_positive(key: str, value: Any, max_value: int = MAX_COUNT) -> None:
    """Reject a ``value`` that is not an integer from 1 to ``max_value``."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= 1, f"{key}={value!r} must be an integer of at least 1")
    require(value <= max_value, f"{key}={value!r} must be at most {max_value:,}")


def require_package(key: str, package: str, extra: str) -> None:
    """Reject a setting whose package is not installed. The message says how to install it."""
    try:
        import_module(package)
    except ImportError as error:
        fix = f"pip install 'exactbatch-trainer[{extra}]'"
        raise RecipeError(f"{key} needs the package {package} ({error}): {fix}") from error
