"""Small frozen value types that packages exchange. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainer.errors import RecipeError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

IGNORED_LABEL = -100  # a label without weight, as in torch's cross entropy and in transformers

Task = Literal["single_label", "multi_label", "regression", "token", "language"]
"""The prediction for a sample: one of several classes, any number of labels, numbers, a class per token, or the token
that follows each token."""

TASK_METRICS: Mapping[str | None, tuple[str, ...]] = {
    "single_label": ("accuracy",),
    "multi_label": ("f1_micro", "f1_macro", "subset_accuracy"),
    "regression": ("mae", "rmse", "r2"),
    "token": ("accuracy", "f1_macro"),
    "language": ("perplexity",),
    None: (),
}
"""The metrics of each task in addition to the loss, the main one first. An accuracy of 1 is 100 %."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a pair (sum, weight), never a mean: it adds up exactly for any split of a batch.

    Args:
        total: sum of the loss over the micro-batch's weighted items (samples or tokens); a scalar tensor.
        weight: the number of items in that sum; must equal the model's ``weigh`` for this micro-batch. ``None`` stands
            for the number of ``targets`` that are not ``-100``, counted on demand.
        name: one of the model's ``loss_names``.
        logits: detached predictions, shape ``(items, classes)``, for metrics during evaluation (optional).
        targets: the class of each item, shape ``(items,)``; ``-100`` is ignored (optional). For multi_label and
            regression, same shape as the logits.
    """

    total: Tensor
    weight: Tensor | float | None = None
    name: str = "loss"
    logits: Tensor | None = None
    targets: Tensor | None = None

    def counted(self) -> Tensor | float:
        """Return the weight, or the number of targets if it is ``None``."""
        if self.weight is not None:
            return self.weight
        if self.targets is None:
            raise RecipeError(f"loss {self.name!r} has neither a weight nor targets to count: give it a weight")
        return (self.targets != IGNORED_LABEL).count_nonzero()


class ImageInput(NamedTuple):
    """The images that a model was trained on."""

    size: int | None  # height and width, in pixels; None if unknown
    mean: tuple[float, ...]  # mean of each channel, for pixels from 0 to 1; empty if unknown
    std: tuple[float, ...]


class MixupConfig(NamedTuple):
    """Settings of mixup and CutMix.

    Args:
        mixup: both parameters of the beta distribution of a sample's share in mixup (Zhang et al. 2018); 0 is off.
        cutmix: the same for CutMix (Yun et al. 2019). With both, a batch draws one of them.
        probability: probability that a batch is mixed.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0


class MixupDraw(NamedTuple):
    """One draw of mixup or CutMix for a micro-batch. The partners of its samples come from the same batch.

    Args:
        partners: the partner of each sample, by its index in the dataset.
        seeds: seed of each partner's augmentation.
        lam: share of a sample's own pixels and label, in 256ths: all floating-point types represent it, and 1 - lam.
        box_center: centre of the rectangle that CutMix takes from the partner, as shares of the image; ``None`` for
            mixup. If the border cuts the rectangle off, ``lam`` grows.
    """

    partners: list[int]
    seeds: list[int] | None
    lam: float
    box_center: tuple[float, float] | None = None


class Request(NamedTuple):
    """A micro-batch to load: its samples, optional seeds of their random draws, and how to mix them."""

    indices: list[int]
    seeds: list[int] | None = None
    mix: MixupDraw | None = None


@dataclass(frozen=True, eq=False)  # compared by identity: a key of caches, with up to a million entries
class ShuffleGroups:
    """Samples that are stored together, such as row groups of files: fast to read in order, slow in random order.

    Each epoch has its own order of the groups. Successive groups with together ``shuffle_buffer`` samples form a
    shuffle block, and the samples of a block are shuffled.

    Args:
        sizes: number of samples of every group, in order.
        shuffle_buffer: minimum number of samples of a block, except the last of an epoch.
    """

    sizes: Sequence[int]
    shuffle_buffer: int


@dataclass(frozen=True, eq=False)  # compared by identity, as ShuffleGroups
class SampleWeights:
    """Relative probabilities of drawing each sample, with replacement. An epoch draws as many samples as there are.

    Args:
        weights: a number of at least 0 for every sample; the sum need not be 1.
    """

    weights: Sequence[float]


class BadSample(NamedTuple):
    """A sample that could not be loaded."""

    position: int  # its index in the split
    description: str  # its file or row
    reason: str  # why it could not be loaded


@dataclass(slots=True)
class Packed:
    """A micro-batch before and after ``packed``, both on the host."""

    batch: Any  # collated
    packed: Any  # the result of the model's ``packed``, for ``losses``


class PartialBatch(NamedTuple):
    """A micro-batch without the requested samples that could not be loaded."""

    batch: Any  # the other samples, collated or Packed; if none is left, another sample of the split
    kept_indices: list[int]  # indices, in the split, of the requested samples in it
    bad: list[BadSample]


@dataclass(frozen=True, slots=True)
class DataSpec:
    """The shapes and sizes of a dataset without its files: enough to plan with synthetic samples.

    Args:
        tensors: dtype and shape of each tensor of the longest sample, such as
            ``{"pixel_values": ("float32", (3, 32, 32)), "labels": ("int64", ())}``.
        train: number of training samples.
        val: number of validation samples.
        test: number of test samples.
        num_classes: number of classes of the labels; ``None`` if they are not classes.
        length: tokens per sample, for texts.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    train: int
    val: int = 0
    test: int = 0
    num_classes: int | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of the value of a parameter or buffer.

    Args:
        file: a safetensors file.
        key: the name of the tensor in it.
        transform: converts the stored tensor to the value, if they differ. Every rank then reads the whole tensor,
            otherwise only its part.
    """

    file: Path
    key: str
    transform: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """The sources of all values of a module.

    Args:
        stored: the file and key of each parameter and persistent buffer, by its name in the module. One name is enough
            for tied parameters. A buffer without an entry keeps its value from ``skeleton``.
        new: names of the parameters that are in no file, such as a new head.
        initialise: draws the values of new parameters. It is called with a skeleton whose new parameters are real
            (float32, on the CPU) and whose others are on meta, with torch's generator seeded. The default calls
            ``reset_parameters()`` of each module that owns a new parameter.
    """

    stored: Mapping[str, StoredTensor]
    new: Collection[str] = ()
    initialise: Callable[[nn.Module], object] | None = None
