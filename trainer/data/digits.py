"""scikit-learn's handwritten digits, read from its files: importing scikit-learn takes a second or more."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels, float64 ``(1797, 8, 8)`` from 0 to 16, and classes, int64 ``(1797,)``."""
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    path = Path(next(iter(folders or ["sklearn"]))) / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():  # another scikit-learn may keep them elsewhere, and knows where
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target.astype(np.int64)
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
