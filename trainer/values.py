"""The small frozen things that travel between the floors. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainer.errors import RecipeError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

IGNORED_LABEL = -100  # the label without weight: the convention of torch's cross entropy and of transformers

Task = Literal["single_label", "multi_label", "regression", "token", "language"]
"""What a model says of a sample: one class of several, any number of labels, numbers, a class of every token, or the
next token of every token."""

TASK_METRICS: Mapping[str | None, tuple[str, ...]] = {
    "single_label": ("accuracy",),
    "multi_label": ("f1_micro", "f1_macro", "subset_accuracy"),
    "regression": ("mae", "rmse", "r2"),
    "token": ("accuracy", "f1_macro"),
    "language": ("perplexity",),
    None: (),
}
"""The metrics of each task besides the loss, the main one first; an accuracy of 1 is 100 %."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss as a pair that can be added up exactly, however a batch is cut: never a mean.

    Args:
        total: sum of the loss over the micro-batch's weighted items (samples or tokens); a scalar tensor.
        weight: how many items that sum runs over; must be what the model's ``weigh`` said for this micro-batch.
            ``None`` means the number of ``targets`` that are not ``-100``, counted only when somebody asks.
        name: which of the model's ``loss_names`` this is.
        logits: detached predictions, shape ``(items, classes)``, for metrics during evaluation (optional).
        targets: the class of each item, shape ``(items,)``; ``-100`` is ignored (optional). Of the tasks multi_label
            and regression they have the shape of the logits.
    """

    total: Tensor
    weight: Tensor | float | None = None
    name: str = "loss"
    logits: Tensor | None = None
    targets: Tensor | None = None

    def counted(self) -> Tensor | float:
        """The weight, or the number of targets where it was left at ``None``."""
        if self.weight is not None:
            return self.weight
        if self.targets is None:
            raise RecipeError(f"loss {self.name!r} has neither a weight nor targets to count: give it a weight")
        return (self.targets != IGNORED_LABEL).count_nonzero()


class ImageInput(NamedTuple):
    """The images that a model was trained on."""

    size: int | None  # height and width, in pixels; None where nobody says
    mean: tuple[float, ...]  # of each channel, of pixels from 0 to 1; empty where nobody says
    std: tuple[float, ...]


class MixupConfig(NamedTuple):
    """How training samples are mixed with each other.

    Args:
        mixup: both parameters of the beta distribution of a sample's share, of mixup (Zhang et al. 2018); 0 is off.
        cutmix: the same of CutMix (Yun et al. 2019). With both, a batch draws one of them.
        probability: that a batch is mixed at all.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0


class MixupDraw(NamedTuple):
    """How the samples of a micro-batch are mixed with their partners, which are of the same batch.

    Args:
        partners: the partner of each sample, by its place in the dataset.
        seeds: of each partner's augmentation.
        share: of a sample's own pixels and label, in 256ths: every floating-point type has these, and 1 - share.
        centre: of the rectangle that CutMix takes of the partner, as shares of the image; ``None`` for mixup. Where it
            is cut off by the border, ``lam`` grows.
    """

    partners: list[int]
    seeds: list[int] | None
    lam: float
    box_center: tuple[float, float] | None = None


class Request(NamedTuple):
    """One micro-batch to fetch: its samples, the seed of what is drawn for each if anything is, and how to mix them."""

    indices: list[int]
    seeds: list[int] | None = None
    mix: MixupDraw | None = None


@dataclass(frozen=True, eq=False)  # by identity: it is a key of caches, and may have a million entries
class ShuffleGroups:
    """Samples that lie together, such as the row groups of files: fast to read one after the other, slow all over.

    An epoch takes the groups in an order of its own. So many in a row that they hold ``shuffle_buffer`` samples make a
    stretch, whose samples are shuffled with each other; stretch follows stretch.

    Args:
        sizes: samples of every group; they follow one another.
        mixed: samples of a stretch, at least, but for the last of an epoch.
    """

    sizes: Sequence[int]
    shuffle_buffer: int


@dataclass(frozen=True, eq=False)  # by identity, as Groups
class SampleWeights:
    """How likely each sample is drawn, with replacement, for every place of an epoch, which has as many as there are
    samples.

    Args:
        relative: a number of at least 0 for every sample; their sum need not be 1.
    """

    weights: Sequence[float]


class BadSample(NamedTuple):
    """A sample that could not be loaded."""

    position: int  # its place in its split
    description: str  # its file or row
    reason: str  # what is wrong with it


@dataclass(slots=True)
class Packed:
    """A micro-batch in both forms, both on the host."""

    batch: Any  # collated
    packed: Any  # what the model's ``packed`` made of it, for ``losses``


class PartialBatch(NamedTuple):
    """A micro-batch without some of the samples that were asked for."""

    batch: Any  # the others, collated or Packed; where none is left, a sample of the same split that nobody asked for
    kept_indices: list[int]  # the samples in it that were asked for, by their place in the split
    bad: list[BadSample]


@dataclass(frozen=True, slots=True)
class Outline:
    """What a dataset holds, known without its files: enough to plan with samples that are made up.

    Args:
        tensors: the dtype and the shape of each tensor of a sample, the longest that there is, such as
            ``{"pixel_values": ("float32", (3, 32, 32)), "labels": ("int64", ())}``.
        train: samples to train on.
        val: samples of the validation set; 0 without one.
        test: samples of the test set; 0 without one.
        num_classes: of the labels; ``None`` where they are no classes.
        length: tokens of a sample, of texts.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    train: int
    val: int = 0
    test: int = 0
    num_classes: int | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Where the value of a parameter or buffer is kept.

    Args:
        file: a safetensors file.
        key: the name of the tensor in it.
        transform: from the whole tensor as stored to the whole value, where they differ; the tensor is then read whole
            on every rank, else each rank reads its part.
    """

    file: Path
    key: str
    transform: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Where the values of a module come from.

    Args:
        stored: the file and key of each parameter and persistent buffer, by its name in the module. Of tied parameters
            one name is enough. A buffer that is left out keeps the value that ``skeleton`` gave it.
        new: names of the parameters that no file has, such as a head for other classes.
        initialise: draws the values of new parameters. It is called with a skeleton whose new parameters are real
            (float32, on the CPU) and whose others are on meta, with torch's generator seeded. The default calls
            ``reset_parameters()`` of each module that owns a new parameter.
    """

    stored: Mapping[str, Stored]
    new: Collection[str] = ()
    initialise: Callable[[nn.Module], object] | None = None
