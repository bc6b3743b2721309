"""How a wrong setting and a failed run are reported: one line that names the cause and the fix."""

from __future__ import annotations

from importlib import import_module
from typing import Any, get_args


class RecipeError(ValueError):
    """A setting that cannot work. The message names the key, the value and the fix."""


class RunError(RuntimeError):
    """A run that could not go on. The message says where it was and what to do."""


EXIT_REQUEUE = 75
"""The exit code of a run that was asked to stop and can be resumed: EX_TEMPFAIL of sysexits.h, "try again later"."""


class Stopped(RunError):
    """A run that was asked to stop, and has saved everything. It ends with :data:`EXIT_REQUEUE`."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`RecipeError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise RecipeError(message)


def require_choice(key: str, value: Any, choices: Any) -> None:
    """Refuse a ``value`` that is not one of the ``Literal`` type ``choices``; for recipes written in Python."""
    require(value in get_args(choices), f"{key}={value!r} is not one of {', '.join(map(str, get_args(choices)))}")


def require_positive(key: str, value: Any) -> None:
    """Refuse a ``value`` that is not an integer of at least 1."""
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        f"{key}={value!r} must be an integer of at least 1",
    )


def require_package(key: str, package: str, extra: str) -> None:
    """Refuse a setting whose package is not there.

    Raises:
        RecipeError: naming the setting, the package and how to install it.
    """
    try:
        import_module(package)
    except ImportError as error:
        raise RecipeError(
            f"{key} needs the package {package} ({error}): pip install 'exactbatch-trainer[{extra}]'"
        ) from error
