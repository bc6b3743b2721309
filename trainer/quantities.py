"""Amounts as people write them: a memory budget, a time."""

from __future__ import annotations

import re

from trainer.errors import require

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*$", re.IGNORECASE)
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_BUDGET = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B)\s*$", re.IGNORECASE)


def parse_budget(text: str) -> tuple[float, bool]:
    """Read a memory budget: ``(bytes, False)`` for ``2GB`` (1e9) or ``2GiB`` (2^30), ``(fraction, True)`` for ``90%``.

    Raises:
        RecipeError: when it is none of these, or zero, or more than 100 %.
    """
    match = _BUDGET.match(str(text))
    require(match is not None, f"memory.budget={text!r} is not a memory size: write it as 2GB, 1.5GiB or 90%")
    assert match is not None
    number, unit = float(match[1]), match[2].lower()
    require(number > 0, f"memory.budget={text!r} must be greater than 0")
    if unit == "%":
        require(number <= 100, f"memory.budget={text!r} is more than the whole device")
        return number / 100, True
    exponent = " kmgt".index(unit[0]) if unit[0] != "b" else 0
    return number * (1024 if "i" in unit else 1000) ** exponent, False


def parse_duration(key: str, text: str) -> float:
    """The seconds in ``90s``, ``15min`` or ``1.5h``.

    Raises:
        RecipeError: naming ``key``, when it is none of these, or zero.
    """
    match = _DURATION.match(str(text))
    require(match is not None, f"{key}={text!r} is not a time: write it as 90s, 15min or 1.5h")
    assert match is not None
    seconds = float(match[1]) * _SECONDS[match[2].lower()]
    require(seconds > 0, f"{key}={text!r} must be greater than 0")
    return seconds
