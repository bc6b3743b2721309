"""Shared code of image and text datasets: settings, paths, fixed stratified splits. No heavy import."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlparse
from urllib.request import url2pathname

from trainer.contract import Data
from trainer.errors import RecipeError, format_list, require, suggest_name
from trainer.recipe import MAX_SECONDS
from trainer.values import DataSpec, Task

if TYPE_CHECKING:
    from numpy import ndarray
    from numpy.random import RandomState

SEPARATORS = (",", ";", "\t", "|")  # between the cells of csv files
IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # as torchvision
MAX_LINE_BYTES = 32_000_000  # max size of a line, a cell or a text file
MAX_SHOWN_CLASSES = 5


@dataclass(kw_only=True)
class Loading(Data):
    """Settings of loading samples.

    Args:
        workers: processes that load data; 0 loads in the main process, null is up to 4 per rank on a GPU, else 0.
        worker_timeout: max seconds for a worker to load a micro-batch; after that it counts as hung and ends the run.
        max_bad_samples: max number of samples, over all ranks, that are skipped because they cannot be loaded.
    """

    workers: int | None = 0
    worker_timeout: float = 300.0
    max_bad_samples: int = 0


class BuiltinDataset(Loading):
    """Base class of the datasets of this package. It documents the settings that they share.

    Args:
        val_fraction: share of the training samples held out for validation; always the same samples.
        val_fold: index, from 0, of the fold to hold out for cross-validation. val_fraction is then the size of a fold:
            1/2, 1/3, ... Null holds out a random sample that is not one of the folds.
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
            parts = round(1 / fraction) if fraction else 0
            given = f"data.val_fold={fold} with data.val_fraction={fraction}"
            is_share = parts > 1 and math.isclose(parts * fraction, 1, abs_tol=1e-3)
            require(is_share, f"{given}: the fraction must be 1/2, 1/3, ..., such as 0.2 for five folds")
            require(0 <= fold < parts, f"{given}: the fold must be from 0 to {parts - 1}")
        require((workers or 0) >= 0, f"data.workers={workers} must not be negative; 0 loads in the main process")
        if not 0 < seconds <= MAX_SECONDS:
            raise RecipeError(f"data.worker_timeout={seconds} must be more than 0 and at most {MAX_SECONDS:,} seconds")
        require(bad >= 0, f"data.max_bad_samples={bad} must not be negative; 0 ends the run at the first bad sample")
        for name in ("val_file", "val_files", "val_split"):
            if fraction and (value := getattr(self, name, None)) is not None:
                both = f"data.{name}={value!r} and data.val_fraction={fraction}"
                raise RecipeError(f"{both} exclude each other: give one")

    def _make_spec(self, train: int, test: int, num_classes: int, tensors: Mapping[str, Any], **more: Any) -> DataSpec:
        """Return the spec of ``train`` samples, some of them held out, and ``test`` samples, with one label each."""
        held = math.ceil(self.val_fraction * train)
        return DataSpec({**tensors, "labels": ("int64", ())}, train - held, held, test, num_classes, **more)

    def _hold_out(self, strata: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        return hold_out(strata, self.val_fraction, "data.val_fraction", fold=self.val_fold)

    def _set_classes(self, names: Sequence[str]) -> None:
        self.class_names, self.num_classes = list(names), len(names)


@dataclass(kw_only=True)
class ClassWeightedDataset(BuiltinDataset):
    """A dataset with labels, which can draw training samples by class and hold out some for validation.

    Args:
        sampling: uniform uses each training sample once per epoch. balanced draws with replacement, all classes equally
            often. A mapping such as {cat: 1, lynx: 10} gives the sample weight of each class: a lynx is drawn 10 times
            as often as a cat. An epoch then has one draw per training sample.
    """

    sampling: Literal["uniform", "balanced"] | dict[str, float] = "uniform"
    val_fraction: float = 0.0
    val_fold: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {} if self.sampling in ("uniform", "balanced") else self.sampling
        if not isinstance(weights, Mapping):
            allowed = "must be uniform, balanced or a mapping from classes to numbers"
            raise RecipeError(f"data.sampling={self.sampling!r} {allowed}")
        for name, weight in weights.items():
            fits = is_number(weight) and 0 <= weight < math.inf
            require(fits, f"data.sampling: {name}: {weight!r} must be a number of at least 0")

    def sample_weights(self) -> Sequence[float] | None:
        """Return the sample weights of the training samples according to ``sampling``."""
        if self.sampling == "uniform":
            return None
        import numpy as np

        cause = f"data.sampling={self.sampling!r} needs one class per sample"
        require(self._task == "single_label", f"{cause}: with model.task={self._task} use uniform")
        labels = np.asarray(self.train.labels)
        if self.sampling == "balanced":
            return (1 / np.bincount(labels, minlength=self.num_classes).clip(min=1))[labels]
        given = {str(name): float(weight) for name, weight in self.sampling.items()}
        unknown, missing = sorted({*given} - {*self.class_names}), [c for c in self.class_names if c not in given]
        if unknown:
            hint = suggest_name(unknown[0], self.class_names) or f"; the classes are {format_list(self.class_names)}"
            raise RecipeError(f"data.sampling: there is no class {format_list(unknown)}{hint}")
        require(not missing, f"data.sampling gives no number for {format_list(missing)}: give one for each class")
        found = np.asarray([given[name] for name in self.class_names])[labels]
        require(found.sum() > 0, "data.sampling gives 0 to every class that has samples: raise one")
        return found


def require_fraction(key: str, value: Any, off: str = "0", most: int = 1) -> None:
    """Check that ``value`` is a number from 0 to ``most``."""
    require(is_number(value) and 0 <= value <= most, f"{key}={value!r} must be a number from 0 to {most}; {off} is off")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def local_path(text: str) -> Path:
    """Convert a path, possibly with ``~``, or a ``file://`` URL to a ``Path``."""
    return Path(url2pathname(urlparse(text).path)) if text.startswith("file://") else Path(text).expanduser()


def format_counts(counts: Mapping[str, int]) -> str:
    """Return the number of classes and the samples of each, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    more = f" and {len(counts) - MAX_SHOWN_CLASSES:,} more" if len(counts) > MAX_SHOWN_CLASSES else ""
    shown = ", ".join(f"{name} {count:,}" for name, count in ordered[:MAX_SHOWN_CLASSES])
    return f"{len(counts):,} classes ({shown}{more})"


def separator_of(header: str) -> str:
    """Return the common separator that splits the ``header`` into the most columns; a comma if none does."""
    return max(SEPARATORS, key=lambda sign: len(next(csv.reader([header], delimiter=sign), [])))


def root_cause(error: BaseException) -> str:
    """Return type and first line of the root cause of a chain of exceptions."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def explain_faults(what: str, fix: str = "fix the file") -> Iterator[None]:
    """Convert an error of a library that reads a file, which may be of any class, to a ``RecipeError``."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"{what} ({root_cause(error)}): {fix}") from error


def hold_out(
    labels: Sequence[int], fraction: float, key: str, seed: int = 0, fold: int | None = None
) -> tuple[Sequence[int], Sequence[int]]:
    """Split the positions of ``labels`` into ``(kept, held out)``, both sorted and stratified by class.

    The split is the same for all seeds of runs, and equals scikit-learn's ``train_test_split``, whose import would
    double the start time of a small run. With a ``fold``, that one of 1 / ``fraction`` stratified folds is held out.
    """
    if fraction == 0:
        return range(len(labels)), []
    require(len(labels) > 0, f"{key}={fraction}, but there are no samples: check that the data files are complete")
    import numpy as np

    classes, codes, counts = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
    sizes = len(codes) - math.ceil(fraction * len(codes)), math.ceil(fraction * len(codes))
    why = f"a part would have {min(sizes)} samples of {len(classes)} classes"
    if counts.min() < 2:
        why = f"class {classes[counts.argmin()]} has one sample, and needs two"
    short = f"{key}={fraction} of {len(codes)} samples cannot contain every class ({why})"
    require(counts.min() >= 2 and min(sizes) >= len(classes), f"{short}: use another fraction or more samples")
    generator = np.random.RandomState(seed)  # as scikit-learn does
    if fold is not None:  # assign the samples, sorted by class, to the folds in turn
        classwise = [np.flatnonzero(codes == code)[generator.permutation(count)] for code, count in enumerate(counts)]
        parts, dealt = round(1 / fraction), np.concatenate(classwise)
        place = np.arange(len(dealt)) % parts
        return sorted(dealt[place != fold].tolist()), sorted(dealt[place == fold].tolist())
    kept_counts = _apportion(counts, sizes[0], generator)
    held_counts = _apportion(counts - kept_counts, sizes[1], generator)
    kept: list[int] = []
    held: list[int] = []
    for code, count in enumerate(counts):
        shuffled = np.flatnonzero(codes == code)[generator.permutation(count)]
        kept += shuffled[: kept_counts[code]].tolist()
        held += shuffled[kept_counts[code] : kept_counts[code] + held_counts[code]].tolist()
    return sorted(kept), sorted(held)


def _apportion(counts: ndarray, draws: int, generator: RandomState) -> ndarray:
    """Distribute ``draws`` in proportion to ``counts``. The largest remainders are rounded up, ties at random."""
    import numpy as np

    exact = counts / counts.sum() * draws
    dealt = np.floor(exact)
    missing, remainders = int(draws - dealt.sum()), exact - dealt
    for value in np.unique(remainders)[::-1]:
        if missing == 0:
            break
        tied = np.flatnonzero(remainders == value)
        chosen = generator.choice(tied, size=min(len(tied), missing), replace=False)
        dealt[chosen] += 1
        missing -= len(chosen)
    return dealt.astype(int)
