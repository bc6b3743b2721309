"""The error to expect of predicted memory, by kind of loop: errors for peaks that others have published."""

from __future__ import annotations

from typing import NamedTuple


class PublishedErrors(NamedTuple):
    """Errors of predicted peaks, in percent: predicted / published - 1."""

    rows: int  # published peaks that were not known when the simulator was written
    sources: int  # authors who published them
    low: float
    high: float
    median: float  # median of the absolute errors


PUBLISHED = {
    "eager": PublishedErrors(14, 5, -1.2, 10.6, 0.1),
    "adapters": PublishedErrors(13, 2, -4.3, 2.2, 1.3),
    "compiled": PublishedErrors(18, 3, -8.2, 10.2, 1.1),
    "FSDP2": PublishedErrors(2, 1, -3.6, -2.7, 3.2),
    "old torch": PublishedErrors(5, 1, -15.7, -0.1, 5.2),
}
"""Errors by kind of loop; docs/planner/accuracy.md has the rows."""

MAX_ADAPTER_SHARE = 0.1  # max share of the weights that adapters train
OLD_TORCH = (2, 4)  # the first version that is not old


def kind_of_loop(is_compiled: bool, is_sharded: bool, trained_share: float, torch_version: tuple[int, int]) -> str:
    """Return the kind in ``PUBLISHED`` with the errors to expect; the first that applies of the less certain ones."""
    applies = {
        "compiled": is_compiled,
        "FSDP2": is_sharded,
        "adapters": 0 < trained_share <= MAX_ADAPTER_SHARE,
        "old torch": torch_version < OLD_TORCH,
    }
    return next((kind for kind, does in applies.items() if does), "eager")


def expected_error(kind: str) -> str:
    """Describe the errors of a kind of loop in one line."""
    rows, sources, low, high, median = PUBLISHED[kind]
    authors = f"{sources} source{'s' if sources > 1 else ''}"
    return f"{rows} published peaks like this ({kind}, {authors}): {low:+g} to {high:+g} %, half within {median:g} %"
