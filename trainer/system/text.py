"""Texts for people: what came from outside must not steer their terminal, nor look like a line of ours."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Container, Sequence
from typing import Any

from trainer.errors import require

# Controls of C0 and C1 (escape sequences begin with one), what turns the direction of writing, separators of lines, and
# the lone surrogates by which Python keeps bytes of a file name that are no text: no stream could encode these.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: object, keep: str = "") -> str:
    r"""``text`` with control characters written out: ``\x1b``, ``\n``, ``\u202e``.

    Args:
        text: a name, a label, a message; anything else is made a string.
        keep: control characters that are meant, such as ``"\n"`` in a text of several lines.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _written_out(found[0]), str(text))


def _written_out(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def as_text(value: Any) -> str:
    """A setting as it is written in YAML and on a command line."""
    return json.dumps(value) if value is None or isinstance(value, (bool, list)) else str(value)


# Lines and tables for a terminal.

WIDTH, WIDEST = 112, 120
"""Characters of a line of text, and of a table."""


def wrapped(line: str, indent: str) -> str:
    """``line`` on as many as it takes, those after the first behind ``indent``."""
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def columns(names: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str]) -> str:
    """A table: columns that are named in ``words`` are aligned to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    gap = "  " if sum(widths) + 2 * len(names) <= WIDEST else " "

    def line(cells: Sequence[str]) -> str:
        placed = zip(names, cells, widths, strict=True)
        return gap.join(f"{cell:{'<' if name in words else '>'}{width}}" for name, cell, width in placed).rstrip()

    return "\n".join([line(names), gap.join("-" * width for width in widths), *map(line, rows)])


# Amounts as people write them: a memory budget, a time.

_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(s|min|h)\s*$", re.IGNORECASE)
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_BUDGET = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B)\s*$", re.IGNORECASE)


def parse_budget(text: str, whole: float) -> float:
    """The bytes in a memory budget: ``2GB`` (1e9), ``2GiB`` (2^30), or ``90%`` of ``whole``.

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
        return number / 100 * whole
    exponent = " kmgt".index(unit[0]) if unit[0] != "b" else 0
    return number * (1024 if "i" in unit else 1000) ** exponent


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


# Units of memory: decimal, as makers of devices count.

GB = 1e9
MB = 1e6


def gigabytes(size: int) -> str:
    """For a person, finer where there is little."""
    if abs(size) < 0.01 * GB:
        return f"{size / MB:.1f} MB"
    return f"{size / GB:.2f} GB" if abs(size) >= GB else f"{size / GB:.3f} GB"
