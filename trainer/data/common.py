"""What image and text datasets share: paths, checks of fractions, fixed stratified splits. No heavy import."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from trainer.contract import Data
from trainer.errors import RecipeError, require
from trainer.recipe import MOST_SECONDS

_SPLIT_SEED = 0
"""Splits do not follow the run's seed: runs with different seeds are measured on the same samples."""


def local_path(text: str) -> Path:
    """The path that ``text`` names: a path, one that starts with ``~``, or a ``file://`` URL."""
    if text.startswith("file://"):
        return Path(url2pathname(urlparse(text).path))
    return Path(text).expanduser()


def require_fraction(key: str, value: float, *, zero: bool = True) -> None:
    """Refuse a ``value`` outside [0, 1), or 0 as well unless ``zero``."""
    require(
        0 < value < 1 or (zero and value == 0),
        f"{key}={value} must be {'at least 0' if zero else 'more than 0'} and less than 1",
    )


def check_loading(data: Data) -> None:
    """Refuse settings of the loader that cannot work.

    Raises:
        RecipeError: naming the setting.
    """
    require((data.workers or 0) >= 0, f"data.workers={data.workers} must not be negative; 0 loads in the main process")
    require(
        0 < data.worker_timeout <= MOST_SECONDS,
        f"data.worker_timeout={data.worker_timeout} must be more than 0 seconds, and at most {MOST_SECONDS:,}",
    )
    require(
        data.max_bad_samples >= 0,
        f"data.max_bad_samples={data.max_bad_samples} must not be negative; 0 ends the run at the first bad sample",
    )


def reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom of a chain of exceptions, with its type."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def hold_out(labels: Sequence[int], fraction: float, key: str) -> tuple[list[int], list[int]]:
    """Cut the positions of ``labels`` in two: ``(kept, held out)``, both sorted, with each class in proportion.

    Raises:
        RecipeError: naming ``key`` when a class has too few samples to be in both parts.
    """
    if fraction == 0:
        return list(range(len(labels))), []
    from trainer.data.splits import stratified_split

    try:
        return stratified_split(labels, fraction, _SPLIT_SEED)
    except ValueError as error:
        raise RecipeError(
            f"{key}={fraction} of {len(labels)} samples cannot hold every class ({error}): "
            "use another fraction or more samples"
        ) from error
