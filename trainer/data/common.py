"""What image and text datasets share: settings, paths, fixed stratified splits. No heavy import."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlparse
from urllib.request import url2pathname

from trainer.contract import Data
from trainer.errors import RecipeError, listed, nearest, require
from trainer.recipe import MOST_SECONDS
from trainer.values import Outline, Task

if TYPE_CHECKING:
    from numpy import ndarray
    from numpy.random import RandomState


@dataclass(kw_only=True)
class Loading(Data):
    """The settings of how samples are loaded.

    Args:
        workers: processes that load data; 0 loads in the main process, null is up to 4 a rank on a GPU, and else 0.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    workers: int | None = 0
    worker_timeout: float = 300.0
    max_bad_samples: int = 0


class BuiltIn(Loading):
    """What the datasets of this package share. A setting that one of them does not explain is explained here.

    Args:
        val_fraction: share of the training samples held out for validation; always the same samples.
        val_fold: which part of that size is held out, from 0, where the training samples are cut in such parts, for
            cross-validation; val_fraction is then 1/2, 1/3, ... Null holds out one that overlaps with them all.
    """

    tasks: ClassVar[Sequence[Task]] = ("single_label",)
    num_classes: int
    class_names: list[str]
    val_fraction: float = 0.0
    val_fold: int | None = None

    def __post_init__(self) -> None:
        fraction, workers, seconds, bad = self.val_fraction, self.workers, self.worker_timeout, self.max_bad_samples
        require(0 <= fraction < 1, f"data.val_fraction={fraction} must be at least 0 and less than 1")
        if (fold := self.val_fold) is not None:
            why = f"data.val_fold={fold} is one of the parts of size data.val_fraction={fraction}"
            parts = round(1 / fraction) if fraction else 0
            whole = parts > 1 and math.isclose(parts * fraction, 1, abs_tol=1e-3)
            require(whole, f"{why}, which must be 1/2, 1/3, ...: give 0.2 for five parts, say")
            require(0 <= fold < parts, f"{why}: give 0 to {parts - 1}")
        require((workers or 0) >= 0, f"data.workers={workers} must not be negative; 0 loads in the main process")
        require(
            0 < seconds <= MOST_SECONDS,
            f"data.worker_timeout={seconds} must be more than 0 seconds, and at most {MOST_SECONDS:,}",
        )
        require(bad >= 0, f"data.max_bad_samples={bad} must not be negative; 0 ends the run at the first bad sample")
        for name in ("val_file", "val_files", "val_split"):
            value = getattr(self, name, None)
            if value is not None and fraction != 0:
                raise RecipeError(
                    f"data.{name}={value!r} and data.val_fraction={fraction} exclude each other: give one"
                )

    def _outlined(
        self, train: int, test: int, num_classes: int, tensors: Mapping[str, tuple[str, tuple[int, ...]]], **more: Any
    ) -> Outline:
        """What is known of ``train`` samples, of which some are held out, and ``test`` samples, with a label each."""
        held = math.ceil(self.val_fraction * train)
        return Outline({**tensors, "labels": ("int64", ())}, train - held, held, test, num_classes, **more)

    def _set_classes(self, names: Sequence[str]) -> None:
        self.class_names, self.num_classes = list(names), len(names)


@dataclass(kw_only=True)
class Sampled(BuiltIn):
    """A dataset with labels, which may draw its training samples by their class, and hold out some of them.

    Args:
        sampling: uniform has each training sample once an epoch. balanced draws with replacement, all classes equally
            often; a mapping such as {cat: 1, lynx: 10} draws a sample of a class so many times as often as one of
            another. An epoch then has as many draws as there are samples.
    """

    sampling: Literal["uniform", "balanced"] | dict[str, float] = "uniform"
    val_fraction: float = 0.0
    val_fold: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling not in ("uniform", "balanced") and (not isinstance(self.sampling, Mapping)):
            raise RecipeError(
                f"data.sampling={self.sampling!r} must be uniform, balanced or a mapping from classes to numbers"
            )
        if isinstance(self.sampling, Mapping):
            for name, weight in self.sampling.items():
                is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < math.inf
                require(is_number, f"data.sampling: {name}: {weight!r} must be a number of at least 0")

    def chances(self) -> Sequence[float] | None:
        """As ``sampling`` says, of the classes of the training samples."""
        if self.sampling == "uniform":
            return None
        import numpy as np

        if self.prepared_for != "single_label":
            raise RecipeError(
                f"data.sampling={self.sampling!r} goes by one class a sample: with model.task={self.prepared_for} use "
                "uniform"
            )
        labels = np.asarray(self.train.labels)
        if self.sampling == "balanced":
            return (1 / np.bincount(labels, minlength=self.num_classes).clip(min=1))[labels]
        given = {str(name): float(weight) for name, weight in self.sampling.items()}
        unknown, missing = sorted({*given} - {*self.class_names}), [c for c in self.class_names if c not in given]
        if unknown:
            hint = nearest(unknown[0], self.class_names) or f"; there are {listed(self.class_names)}"
            raise RecipeError(f"data.sampling: there is no class {listed(unknown)}{hint}")
        require(not missing, f"data.sampling gives no number for {listed(missing)}: give one for each class")
        found = np.asarray([given[name] for name in self.class_names])[labels]
        require(found.sum() > 0, "data.sampling gives 0 to every class that has samples: raise one")
        return found


def require_share(key: str, value: Any, off: str = "0") -> None:
    """Refuse a ``value`` that is no number from 0 to 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and 0 <= value <= 1, f"{key}={value!r} must be a number from 0 to 1; {off} is off")


def local_path(text: str) -> Path:
    """The path that ``text`` names: a path, one that starts with ``~``, or a ``file://`` URL."""
    return Path(url2pathname(urlparse(text).path)) if text.startswith("file://") else Path(text).expanduser()


def reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom of a chain of exceptions, with its type."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def hold_out(
    labels: Sequence[int], fraction: float, key: str, seed: int = 0, fold: int | None = None
) -> tuple[Sequence[int], Sequence[int]]:
    """Cut the positions of ``labels`` in two: ``(kept, held out)``, both sorted, with each class in proportion.

    They do not follow the run's seed: runs with different seeds are measured on the same samples. They are those of
    scikit-learn's ``train_test_split``; to import it takes as long as all else before the first step of a small run.
    With a ``fold``, that one of 1 / ``fraction`` parts is held out, each with its share of every class.
    """
    if fraction == 0:
        return range(len(labels)), []
    require(len(labels) > 0, f"{key}={fraction} of no samples at all: look whether the files of data are whole")
    import numpy as np

    classes, codes, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    sizes = len(codes) - math.ceil(fraction * len(codes)), math.ceil(fraction * len(codes))
    why = f"a part would have {min(sizes)} samples of {len(classes)} classes"
    if counts.min() < 2:
        why = f"class {classes[counts.argmin()]} has one sample, and needs two"
    fits = counts.min() >= 2 and min(sizes) >= len(classes)
    if not fits:
        raise RecipeError(
            f"{key}={fraction} of {len(codes)} samples cannot hold every class ({why}): use another fraction or more "
            "samples"
        )
    generator = np.random.RandomState(seed)  # as scikit-learn does
    if fold is not None:  # the classes one after the other, dealt out in turn
        classwise = [np.flatnonzero(codes == code)[generator.permutation(count)] for code, count in enumerate(counts)]
        parts, dealt = round(1 / fraction), np.concatenate(classwise)
        place = np.arange(len(dealt)) % parts
        return sorted(dealt[place != fold].tolist()), sorted(dealt[place == fold].tolist())
    kept_counts = _in_proportion(counts, sizes[0], generator)
    held_counts = _in_proportion(counts - kept_counts, sizes[1], generator)
    kept: list[int] = []
    held: list[int] = []
    for code, count in enumerate(counts):
        shuffled = np.flatnonzero(codes == code)[generator.permutation(count)]
        kept += shuffled[: kept_counts[code]].tolist()
        held += shuffled[kept_counts[code] : kept_counts[code] + held_counts[code]].tolist()
    return sorted(kept), sorted(held)


def _in_proportion(counts: ndarray, draws: int, generator: RandomState) -> ndarray:
    """``draws`` dealt out in proportion to ``counts``: the largest remainders are rounded up, ties by lot."""
    import numpy as np

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
