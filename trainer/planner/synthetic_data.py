"""Synthetic samples to plan without data, built from the spec of the dataset."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.contract import Data, Model, Samples
from trainer.values import DataSpec

if TYPE_CHECKING:
    from torch import Tensor


class ConstantSamples(Samples):
    """``count`` identical samples: zeros in the shapes of a spec, and masks of ones."""

    def __init__(self, spec: DataSpec, count: int) -> None:
        self.tensors, self.count = spec.tensors, count
        self.labels = list(range(spec.num_classes or 0))  # read by balanced class weights
        self.lengths = None if spec.length is None else array("q", [spec.length]) * count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[0] for name, tensor in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        import torch

        return {
            name: torch.full((len(indices), *shape), int(name.endswith("_mask")), dtype=getattr(torch, dtype))
            for name, (dtype, shape) in self.tensors.items()
        }


class SyntheticData(Data):
    """A stand-in for a dataset, with the samples of ``spec``, and ``notes`` about them for the plan.

    Attributes that a model reads from its dataset, such as ``image_size``, are copied from ``data``, if given."""

    def __init__(self, spec: DataSpec, data: Data | None = None, notes: Sequence[str] = ()) -> None:
        self.num_classes, self.notes = spec.num_classes, list(notes)
        if data is not None:
            self.class_names, self.image_size, self.channels = data.class_names, data.image_size, data.channels
            self.workers, self.notes = data.workers, [*notes, synthetic_data_note(spec)]
        counts = (spec.train, spec.val, spec.test)
        self.train, self.val, self.test = (ConstantSamples(spec, count) if count else None for count in counts)

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        """No-op: synthetic samples need no preparation."""


def data_notes(data: Data) -> list[str]:
    """Return the notes about synthetic data; empty for a real dataset."""
    return data.notes if isinstance(data, SyntheticData) else []


def synthetic_data_note(spec: DataSpec) -> str:
    """Describe the synthetic samples that replace missing data."""
    planned = f"the data is missing: planned with {spec.train:,} synthetic samples"
    if spec.length is not None:
        return f"{planned} of {spec.length:,} tokens, the maximum of data.max_length"
    shapes = (" × ".join(map(str, shape)) or "1" for name, (_, shape) in spec.tensors.items() if name != "labels")
    return f"{planned} of shape {', '.join(shapes)}, from its spec"
