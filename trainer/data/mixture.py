"""A weighted mixture of several datasets."""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import accumulate, chain
from typing import Any, cast

from trainer.contract import Data, Model, Samples, as_samples, prepare_data, splits_of
from trainer.data.base import Loading, is_number
from trainer.data.images import CIFAR10, Digits, FashionMNIST, ImageFolder
from trainer.data.language import Conversations, Documents
from trainer.data.text import HubText, IMDb, TextFiles
from trainer.errors import RecipeError, require
from trainer.system.field_types import require_types
from trainer.values import MixupConfig, Task

_KINDS = (CIFAR10, Conversations, Digits, Documents, FashionMNIST, HubText, IMDb, ImageFolder, TextFiles)
DATASET_CLASSES: dict[str, Any] = {kind.__name__: kind for kind in _KINDS}
"""Datasets of this package that a flag can name. Streams are missing, because their samples cannot be drawn singly."""
PARTS_HELP = "give a dataset and its weight for each part, or [CLASS, {settings}, weight]"


@dataclass
class Mixture(Loading):
    """Datasets with weights: ``Mixture([(photos, 0.7), (drawings, 0.3)])``.

    Each draw of an epoch chooses a dataset by its weight, independent of its size, and one of its training samples,
    uniformly or according to its ``sampling``, with replacement. An epoch has as many draws as there are training
    samples in total. The validation and test sets are the concatenations of those of the datasets.

    Args:
        parts: pairs of a dataset and a weight above 0, or, for YAML and flags, [[ImageFolder, {root: photos}, 0.7],
            ...]. The weights need not sum to 1. All need the same classes, and samples of one size. The settings of
            loading below apply to all of them.
    """

    parts: list[Any]
    workers: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require(isinstance(self.parts, list | tuple) and bool(self.parts), f"data.parts={self.parts!r}: {PARTS_HELP}")
        self._built = [_built(number, part) for number, part in enumerate(self.parts, start=1)]
        is_finite = sum(weight for _, weight in self._built) < math.inf
        require(is_finite, "data.parts: the sum of the weights overflows: give smaller weights")

    def __getattr__(self, name: str) -> Any:
        """Return other attributes of the first dataset: ``class_names``, ``load_image``, ..."""
        if self.__dict__.get("_built") and not name.startswith("_"):
            return getattr(self._built[0][0], name)
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def datasets(self) -> list[Data]:
        return [data for data, _ in self.__dict__.get("_built", ())]  # none before the fields are set

    def use_model(self, model: Model | None) -> None:
        super().use_model(model)
        for data in self.datasets:
            data.use_model(model)

    @property
    def tasks(self) -> Sequence[Task]:  # type: ignore[override]
        """The tasks for which every dataset has labels."""
        known = [data.tasks for data in self.datasets if data.tasks]
        return [task for task in known[0] if all(task in tasks for tasks in known)] if known else ()

    def require_files(self) -> None:
        for data in self.datasets:
            data.require_files()

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        for data in self.datasets:
            prepare_data(data, model or self._model, tokenizer)
        first = self.datasets[0]
        for number, data in enumerate(self.datasets, start=1):
            names = f"part {number} ({type(data).__name__}) and part 1 ({type(first).__name__})"
            for (key, ours), theirs in zip(_alike(data).items(), _alike(first).values(), strict=True):
                require(ours == theirs, f"Mixture: {names} differ in {key}, {ours} and {theirs}: make them the same")
            alike = type(data).collate is type(first).collate
            require(alike, f"Mixture: {names} collate batches differently: mix datasets of one kind")
            cause = f"Mixture: {names} differ in data.mixup, data.cutmix or data.mix_probability, but share batches"
            require(data.mixup_config() == first.mixup_config(), f"{cause}: make them the same")
            if as_samples(data.train).groups is not None:
                cause = f"Mixture: part {number} ({type(data).__name__}) reads its samples group by group"
                raise RecipeError(f"{cause}, so single samples cannot be drawn: use a dataset that is not streamed")
        self.train = ConcatSplit([data.train for data in self.datasets], self.mixup_config())
        splits = [splits_of(data) for data in self.datasets]
        held = ([found[part] for found in splits if part in found] for part in ("val", "test"))
        self.val, self.test = (ConcatSplit(found) if found else None for found in held)

    def sample_weights(self) -> Sequence[float]:
        """Return the sample weights: the dataset's weight times the sample's share within its dataset."""
        import numpy as np

        found = []
        for data, weight in self._built:
            own = data.sample_weights()
            relative = np.ones(len(data.train)) if own is None else np.asarray(own, dtype=np.float64)
            found.append(weight * relative / relative.sum())
        return cast(Any, np.concatenate(found))

    def mixup_config(self) -> MixupConfig | None:
        """Return the mixup and CutMix settings, which are equal in all datasets."""
        return self._built[0][0].mixup_config()

    def collate(self, samples: Sequence[Any]) -> Any:
        return self._built[0][0].collate(samples)


def _alike(data: Data) -> dict[str, Any]:
    """The attributes that all datasets of a mixture must have in common."""
    classes = {"num_classes": data.num_classes, "class_names": data.class_names}
    return {**classes, "image_size": data.image_size, "channels": data.channels, "max_length": data.max_length}


def _built(number: int, part: Any) -> tuple[Data, float]:
    *given, weight = part if isinstance(part, tuple | list) and part else (None, None)
    data, named = given[0] if given else None, f"data.parts: part {number}"
    if isinstance(data, str) and len(given) < 3:
        if data not in DATASET_CLASSES:
            raise RecipeError(f"{named}: there is no dataset {data}: use one of {', '.join(DATASET_CLASSES)}")
        settings = given[1] if len(given) == 2 else {}
        require(isinstance(settings, dict), f"{named}: {settings!r} must be a mapping of settings of {data}")
        kind = DATASET_CLASSES[data]
        names = [field.name for field in fields(kind) if field.init]
        for key in settings:
            require(key in names, f"{named}: {data} has no setting {key}: use one of {', '.join(names)}")
        for field in fields(kind):
            if field.init and field.default is field.default_factory is MISSING:
                require(field.name in settings, f"{named}: {data} needs the setting {field.name}: add it")
        draft = object.__new__(kind)  # without validation of the settings
        draft.__dict__ |= {field.name: field.default for field in fields(kind)} | settings
        require_types(f"{named}: {data}.", draft)
        data = kind(**settings)
    require(isinstance(data, Data) and len(given) in (1, 2), f"{named} is {part!r}: {PARTS_HELP}")
    wrong = f"{named} ({type(data).__name__}) has the weight {weight!r:.40}"
    fits = is_number(weight) and 0 < weight <= sys.float_info.max
    require(fits, f"{wrong}: it must be a finite number greater than 0")
    return cast(Data, data), float(weight)


class ConcatSplit(Samples):
    """A concatenation of splits. Its fingerprint covers their content and ``settings``."""

    def __init__(self, splits: Sequence[Any], settings: Any = None) -> None:
        self.splits, self.settings = list(map(as_samples, splits)), settings
        self.starts = [0, *accumulate(map(len, splits))]
        self.augmented = any(split.augmented for split in self.splits)
        lengths = [split.lengths for split in self.splits if split.lengths is not None]
        self.lengths = list(map(int, chain.from_iterable(lengths))) if len(lengths) == len(splits) else None

    def __len__(self) -> int:
        return self.starts[-1]

    def _at(self, index: int) -> tuple[Any, int]:
        number = bisect_right(self.starts, index) - 1
        return self.splits[number], index - self.starts[number]

    def __getitem__(self, index: int) -> Any:
        split, own = self._at(index)
        return split[own]

    @property
    def labels(self) -> list[Any] | None:  # type: ignore[override]
        """The label of every sample; ``None`` if a part does not know its labels."""
        labels = [found for split in self.splits if (found := split.labels) is not None]
        return list(chain.from_iterable(labels)) if len(labels) == len(self.splits) else None

    def describe(self, index: int) -> str:
        split, own = self._at(index)
        described = split.describe(own)
        is_default = described == f"sample {own} of {type(split.original).__name__}"
        return f"{described} {self.splits.index(split) + 1}" if is_default else described

    def fingerprint(self) -> str:
        from trainer.data.fingerprint import ContentHasher, split_fingerprint

        return ContentHasher("joined", self.settings, *map(split_fingerprint, self.splits)).hexdigest()
