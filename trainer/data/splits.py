"""The split of scikit-learn's ``train_test_split(..., stratify=labels)``, without scikit-learn.

Importing it takes a second or more, for it imports pandas: as long as everything else of ours before the first step of
a small run. The same samples come out, whatever version of scikit-learn there is.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np


def stratified_split(labels: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Positions of ``labels`` in two parts, both sorted, with each class in proportion: ``(kept, drawn)``.

    Args:
        labels: of the samples, not empty.
        fraction: share of the samples to draw, rounded up to a whole one; in (0, 1).
        seed: of the draw.

    Raises:
        ValueError: when a class has too few samples to be in both parts; it says which number is too small.
    """
    classes, codes, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    drawn_size = math.ceil(fraction * len(codes))
    kept_size = len(codes) - drawn_size
    if counts.min() < 2:
        raise ValueError(f"class {classes[counts.argmin()]} has one sample, and needs two")
    if min(drawn_size, kept_size) < len(classes):
        raise ValueError(f"a part would have {min(drawn_size, kept_size)} samples of {len(classes)} classes")
    generator = np.random.RandomState(seed)  # as scikit-learn does
    kept_counts = _in_proportion(counts, kept_size, generator)
    drawn_counts = _in_proportion(counts - kept_counts, drawn_size, generator)
    kept: list[int] = []
    drawn: list[int] = []
    for code, count in enumerate(counts):
        shuffled = np.flatnonzero(codes == code)[generator.permutation(count)]
        kept.extend(shuffled[: kept_counts[code]].tolist())
        drawn.extend(shuffled[kept_counts[code] : kept_counts[code] + drawn_counts[code]].tolist())
    return sorted(kept), sorted(drawn)


def _in_proportion(counts: np.ndarray, draws: int, generator: np.random.RandomState) -> np.ndarray:
    """``draws`` dealt out in proportion to ``counts``: the largest remainders are rounded up, ties by lot."""
    exact = counts / counts.sum() * draws
    dealt = np.floor(exact)
    missing = int(draws - dealt.sum())
    remainders = exact - dealt
    for value in np.unique(remainders)[::-1]:
        if missing == 0:
            break
        tied = np.flatnonzero(remainders == value)
        chosen = generator.choice(tied, size=min(len(tied), missing), replace=False)
        dealt[chosen] += 1
        missing -= len(chosen)
    return dealt.astype(int)


# scikit-learn's handwritten digits, read from its files: importing scikit-learn takes a second or more.


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
