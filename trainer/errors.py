"""Errors of settings and of runs: one line that names the cause and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, get_args

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


def require(condition: bool, message: str) -> None:
    """Raise :class:`RecipeError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise RecipeError(message)


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
