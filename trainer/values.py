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

Task = Literal[
    "single_label", "multi_label", "regression", "token", "language", "masked_language", "preference", "pairs"
]
"""The prediction for a sample: one of several classes, any number of labels, numbers, a class per token, each next
token, the tokens that are masked, the better of two answers, or embeddings of a pair of texts."""
TASKS_WITHOUT_CLASSES: tuple[Task, ...] = ("language", "masked_language", "preference", "pairs")

TASK_METRICS: Mapping[str | None, tuple[str, ...]] = {
    "single_label": ("accuracy",),
    "multi_label": ("f1_micro", "f1_macro", "subset_accuracy"),
    "regression": ("mae", "rmse", "r2"),
    "token": ("accuracy", "f1_macro"),
    **dict.fromkeys(("language", "masked_language"), ("perplexity",)),
    "preference": ("reward_accuracy", "reward_margin"),
    "pairs": ("recall_at_1", "mrr"),
    None: (),
}
"""The metrics of each task in addition to the loss, the main one first. An accuracy of 1 is 100 %."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a pair (sum, weight), never a mean: it adds up exactly for any split of a batch."""

    total: Tensor  # sum of the loss over the micro-batch's weighted items (samples or tokens); a scalar tensor
    weight: Tensor | float | None = None
    """The number of items in that sum; must equal the model's ``weigh`` for this micro-batch. ``None`` stands for the
    number of ``targets`` that are not ``-100``, counted on demand."""
    name: str = "loss"  # one of the model's ``loss_names``
    logits: Tensor | None = None  # detached predictions, shape ``(items, classes)``, for metrics during evaluation
    targets: Tensor | None = None
    """The class of each item, shape ``(items,)``, or -100; for multi_label and regression the shape of the logits."""

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
    """Settings of mixup and CutMix."""

    mixup: float = 0.0  # both parameters of the beta distribution of a sample's share (Zhang et al. 2018); 0 is off
    cutmix: float = 0.0  # the same for CutMix (Yun et al. 2019). With both, a batch draws one of them
    probability: float = 1.0  # probability that a batch is mixed


class MixupDraw(NamedTuple):
    """One draw of mixup or CutMix for a micro-batch. The partners of its samples come from the same batch."""

    partners: list[int]  # the partner of each sample, by its index in the dataset
    seeds: list[int] | None  # seed of each partner's augmentation
    lam: float  # share of a sample's own pixels and label, in 256ths: every floating-point type represents it exactly
    box_center: tuple[float, float] | None = None
    """Centre of the rectangle that CutMix takes from the partner, as shares of the image; ``None`` for mixup. If the
    border cuts the rectangle off, ``lam`` grows."""


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
    """

    sizes: Sequence[int]  # number of samples of every group, in order
    shuffle_buffer: int  # minimum number of samples of a block, except the last of an epoch


@dataclass(frozen=True, eq=False)  # compared by identity, as ShuffleGroups
class SampleWeights:
    """Relative probabilities of drawing each sample, with replacement. An epoch draws as many samples as there are."""

    weights: Sequence[float]  # a number of at least 0 for every sample; the sum need not be 1


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
    """The shapes and sizes of a dataset without its files: enough to plan with synthetic samples."""

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape of each tensor of the longest sample, such as ``{"pixel_values": ("float32", (3, 32, 32))}``."""
    train: int  # number of training samples
    val: int = 0
    test: int = 0
    num_classes: int | None = None  # number of classes of the labels; ``None`` if they are not classes
    length: int | None = None  # tokens per sample, for texts


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of the value of a parameter or buffer."""

    file: Path  # a safetensors file
    key: str  # the name of the tensor in it
    transform: Callable[[Tensor], Tensor] | None = None
    """Converts the stored tensor to the value, if they differ. Every rank then reads the whole tensor, otherwise only
    its part."""


@dataclass(frozen=True, slots=True)
class PretrainedWeights:
    """The sources of all values of a module."""

    stored: Mapping[str, StoredTensor]
    """The file and key of each parameter and persistent buffer, by its name in the module. One name is enough for tied
    parameters. A buffer without an entry keeps its value from ``skeleton``."""
    new: Collection[str] = ()  # names of the parameters that are in no file, such as a new head
    initialise: Callable[[nn.Module], object] | None = None
    """Draws the values of new parameters. It is called with a skeleton whose new parameters are real (float32, on the
    CPU) and whose others are on meta, with torch's generator seeded. The default calls ``reset_parameters()`` of each
    module that owns a new parameter."""
