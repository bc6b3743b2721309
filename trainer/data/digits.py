"""scikit-learn's handwritten digits, read from its files: importing scikit-learn takes a second or more."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from trainer.errors import RecipeError


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels, float64 ``(1797, 8, 8)`` from 0 to 16, and classes, int64 ``(1797,)``.

    Raises:
        RecipeError: when this scikit-learn does not have them.
    """
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    path = Path(next(iter(folders or ["sklearn"]))) / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",")
    except OSError as error:
        raise RecipeError(f"scikit-learn has no digits in {path} ({error}): install scikit-learn again") from error
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
