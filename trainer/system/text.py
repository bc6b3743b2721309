"""Text for terminals: escaping of untrusted text, tables, units and amounts."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

from trainer.errors import RecipeError, require

WIDTH, MAX_TABLE_WIDTH = 112, 120  # maximum characters in a line of text and of a table
GB, MB = 1e9, 1e6  # decimal, as device makers use
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+|%)\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_BYTES = {"b": 1} | {f"{unit}{i}b": (1024 if i else 1000) ** n for n, unit in enumerate("kmgt", 1) for i in ("", "i")}

# Control characters C0 and C1 (escape sequences start with one), characters that change the writing direction, line
# separators, and the lone surrogates with which Python represents undecodable bytes of file names.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: object, keep: str = "") -> str:
    r"""Return ``str(text)`` with control characters escaped (``\x1b``, ``\n``, ``\u202e``), except those to ``keep``.
    Untrusted text must neither control the terminal nor look like a message of this program."""

    def written_out(found: re.Match[str]) -> str:
        return found[0] if found[0] in keep else found[0].encode("unicode_escape", "surrogatepass").decode("ascii")

    return _UNPRINTABLE.sub(written_out, str(text))


def as_text(value: Any) -> str:
    """Return a setting as written in YAML and on a command line."""
    return json.dumps(value) if value is None or isinstance(value, (bool, list)) else str(value)


def format_number(value: float | None, form: str, missing: str = "unknown") -> str:
    """Return ``format(value, form)``, or ``missing`` without a finite value."""
    return missing if value is None or not math.isfinite(value) else format(value, form)


def format_metric(name: str, value: float | None, missing: str = "unknown") -> str:
    """Return a metric as printed, an accuracy in percent, or ``missing`` without a finite value."""
    return format_number(value, ".2%" if name.endswith("accuracy") else ".4f", missing).replace("%", " %")


def format_names(names: Collection[str]) -> str:
    """Return the first three names, and the number of the others."""
    return ", ".join(list(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def wrapped(line: str, indent: str) -> str:
    """Wrap ``line`` to the width of a terminal, with ``indent`` before all lines but the first."""
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def align_columns(names: Sequence[str], rows: Sequence[Sequence[str]], left_aligned: Container[str]) -> str:
    """Format a table; columns named in ``left_aligned`` are aligned to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    gap = "  " if sum(widths) + 2 * len(names) <= MAX_TABLE_WIDTH else " "

    def line(cells: Sequence[str]) -> str:
        placed = zip(names, cells, widths, strict=True)
        padded = (f"{cell:{'<' if name in left_aligned else '>'}{width}}" for name, cell, width in placed)
        return gap.join(padded).rstrip()

    return "\n".join([line(names), gap.join("-" * width for width in widths), *map(line, rows)])


def parse_budget(text: str, whole: float) -> float:
    """Return the bytes of a memory budget: ``2GB`` (1e9 each), ``2GiB`` (2^30 each), or ``90%`` of ``whole``."""
    kind = "a memory size: write it as 2GB, 1.5GiB or 90%"
    number, unit = _amount("memory.budget", text, {**_BYTES, "%": 0}, kind)
    if unit != "%":
        return number * _BYTES[unit]
    require(number <= 100, f"memory.budget={text!r} is more than the whole device: give at most 100%")
    return number / 100 * whole


def parse_duration(text: str) -> float:
    """Return the seconds in ``90s``, ``15min`` or ``1.5h``, the value of ``checkpoint.every``."""
    number, unit = _amount("checkpoint.every", text, _SECONDS, "a time: write it as 90s, 15min or 1.5h")
    return number * _SECONDS[unit]


def _amount(key: str, text: str, units: Mapping[str, int], kind: str) -> tuple[float, str]:
    match = _AMOUNT.fullmatch(str(text))
    if match is None or match[2].lower() not in units:
        raise RecipeError(f"{key}={text!r} is not {kind}")
    require(float(match[1]) > 0, f"{key}={text!r} must be greater than 0")
    return float(match[1]), match[2].lower()


def format_bytes(size: float) -> str:
    """Format bytes for display: in GB, or in MB if less than 1 GB."""
    if abs(size) >= 0.9995 * GB:
        return f"{size / GB:.2f} GB"
    return f"{size / MB:.0f} MB" if abs(size) >= 9.95 * MB else f"{size / MB:.1f} MB"
