"""What the models share: tasks and their losses, blocks, freezing. Torch is imported on first use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.contract import Preparable, as_samples, weigh_mixed
from trainer.errors import RecipeError, require, require_choice, require_positive, require_types
from trainer.values import IGNORED_LABEL, Loss, Task
from trainer.weights.blocks import find_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trainer.contract import Data

MOST_FEATURES = 10**7  # of a layer, classes or pixels: beyond it a size in bytes may not fit into 64 bits
MOST_LAYERS = 10_000  # each is built separately


ImageTask = Literal["single_label", "multi_label", "regression"]
Distance = Literal["mse", "mae", "huber"]
CLASSES_OF = {"single_label": "class", "token": "class", "multi_label": "label"}


@dataclass(frozen=True)
class Objective:
    """How predictions are compared with the labels: what is minimised is torch's mean over the whole batch.

    Args:
        class_weights: one for each class, in their order, or balanced: samples / (classes × samples of the class), of
            the training data. The mean is divided by the sum of the labels' weights. Of multi_label it is the weight
            of a label that is there (torch's pos_weight), balanced is samples without it / samples with it, and the
            mean is divided by the number of labels.
        label_smoothing: share of a label that is spread evenly over all classes (Szegedy et al. 2016); of multi_label,
            over there and not there.
        focal_gamma: the focal loss (Lin et al. 2017): cross entropy times (1 - probability of the label) to the power
            of gamma, so that what is known already counts less; 0 is cross entropy.
        distance: of regression: mse, mae or huber, which is mse / 2 up to huber_delta and linear beyond.
        huber_delta: in units of the labels.
    """

    class_weights: list[float] | Literal["balanced"] | None = None
    label_smoothing: float = 0.0
    focal_gamma: float = 0.0
    distance: Distance = "mse"
    huber_delta: float = 1.0

    def __post_init__(self) -> None:
        require_types("model.loss.", self)
        require_choice("model.loss.distance", self.distance, Distance)
        weights, smoothing, gamma = self.class_weights, self.label_smoothing, self.focal_gamma
        fix = "give balanced, or a list of numbers of at least 0, not all of them 0"
        named = f"model.loss.class_weights={weights!r}"
        if isinstance(weights, str):
            require(weights == "balanced", f"{named} is no list: {fix}")
        elif weights is not None:
            require(all(0 <= one < math.inf for one in weights) and any(weights), f"{named}: {fix}")
        require(0 <= smoothing < 1, f"model.loss.label_smoothing={smoothing} must be at least 0 and less than 1")
        require(0 <= gamma < math.inf, f"model.loss.focal_gamma={gamma} must be at least 0; the paper has 2")
        both = f"model.loss.focal_gamma={gamma} and model.loss.label_smoothing={smoothing}"
        require(not (gamma and smoothing), f"{both} exclude each other: set one to 0")
        require(0 < self.huber_delta < math.inf, f"model.loss.huber_delta={self.huber_delta} must be greater than 0")

    def require_fit(self, task: Task) -> None:
        """Refuse what is set and means nothing for ``task``."""
        plain = Objective()
        of_classes = ("class_weights", "label_smoothing", "focal_gamma")
        foreign = of_classes if task == "regression" else ("distance", "huber_delta")
        for name in foreign:
            value, unset = getattr(self, name), getattr(plain, name)
            fix = "leave it out" if task == "regression" else "use model.task regression, or leave it out"
            require(value == unset, f"model.loss.{name}={value} means nothing for model.task={task}: {fix}")
        alone = self.distance == "huber" or self.huber_delta == plain.huber_delta
        require(alone, f"model.loss.huber_delta={self.huber_delta} is for model.loss.distance huber")


class Supervised(Preparable):
    """What models share that learn from labels. A setting that one of them does not explain is explained here.

    Args:
        task: single_label, one class of several; multi_label, any number of labels; regression, one or more numbers;
            token, a class for each word of a text.
        loss: how predictions are compared with the labels.
    """

    task: Task
    loss: Objective
    num_classes: int | None
    class_names: list[str] | None

    def suited_to(self, data: Data) -> Supervised:
        """This model with ``balanced`` class weights computed of the training labels of ``data``."""
        weights = self.loss.class_weights
        if weights is None:
            return self
        if weights == "balanced":
            labels = as_samples(data.train).labels
            unknown = f"model.loss.class_weights=balanced needs the training labels, and {type(data).__name__}'s train"
            require(labels is not None, f"{unknown} has no attribute labels: add it, or give the weights as a list")
            weights = balanced_weights(self.task, cast(Any, labels), self.num_classes or 0, self.class_names)
        many = f"model.loss.class_weights has {len(weights)} weights for {self.num_classes} classes: give one for each"
        require(len(weights) == self.num_classes, many)
        return replace(cast(Any, self), loss=replace(self.loss, class_weights=list(weights)))

    def weigh(self, batch: Any) -> dict[str, float]:
        """As torch's mean divides: the sum of the classes' weights, or the number of samples, labels or words."""
        if "labels" not in batch:
            return super().weigh(batch)  # which says what is missing
        labels = batch["labels"]
        if "mixed_labels" in batch:
            return weigh_mixed(batch, self.weigh)
        if self.task == "regression":  # where -100 is a number like any other
            return dict.fromkeys(self.loss_names, float(len(labels)))
        if self.task == "multi_label" or self.loss.class_weights is None:
            return super().weigh(batch)
        return dict.fromkeys(self.loss_names, float(self._weight_of(labels)))

    def loss_of_batch(self, logits: Tensor, batch: Mapping[str, Any]) -> Loss:
        """``loss_of`` the labels of a micro-batch; of mixed samples (mixup, CutMix) that of both labels of each, by
        their shares. So it is for classes with weights, smoothed labels, several labels and numbers alike."""
        own = self.loss_of(logits, batch["labels"])
        if "mixed_labels" not in batch:
            return own
        other = self.loss_of(logits, batch["mixed_labels"])
        share = batch["lam"][0].to(own.total.dtype)
        weight = other.counted() + share.double() * (own.counted() - other.counted())  # exact where they are equal
        return replace(own, total=share * own.total + (1 - share) * other.total, weight=weight)

    def loss_of(self, logits: Tensor, labels: Tensor) -> Loss:
        """The loss of a micro-batch, computed in at least fp32.

        Args:
            logits: shape ``(n, classes)``; of tokens ``(n, length, classes)``.
            labels: integers, shape ``(n,)``, of tokens ``(n, length)``, -100 is ignored; of multi_label 0 or 1, shape
                ``(n, classes)``; of regression numbers, shape ``(n, outputs)`` or, of one output, ``(n,)``.
        """
        import torch

        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        if self.task == "regression" and labels.ndim == 1:
            labels = labels[:, None]
        self._require_labels(logits, labels)
        if self.task in ("single_label", "token"):
            return self._of_classes(logits.flatten(0, -2), labels.flatten())
        labels = labels.to(logits.dtype)
        shown: dict[str, Any] = {"logits": logits.detach(), "targets": labels}
        if self.task == "multi_label":
            return Loss(self._of_labels(logits, labels), float(labels.numel()), **shown)
        if self.loss.distance == "huber":
            total = torch.nn.functional.huber_loss(logits, labels, reduction="sum", delta=self.loss.huber_delta)
        else:
            squared = self.loss.distance == "mse"
            function = torch.nn.functional.mse_loss if squared else torch.nn.functional.l1_loss
            total = function(logits, labels, reduction="sum")
        return Loss(total / logits.shape[-1], float(len(labels)), **shown)

    def _of_classes(self, logits: Tensor, labels: Tensor) -> Loss:
        import torch

        weights, gamma, smoothing = self._weights(logits), self.loss.focal_gamma, self.loss.label_smoothing
        options: dict[str, Any] = {"ignore_index": IGNORED_LABEL}
        cross_entropy = torch.nn.functional.cross_entropy
        if gamma:
            each = cross_entropy(logits, labels, **options, reduction="none")
            # Not 0, at which a power below 1 has no derivative.
            each = each * (-torch.expm1(-each)).clamp_min(torch.finfo(each.dtype).tiny) ** gamma
            total = (each if weights is None else each * weights[labels.clamp_min(0)]).sum()
        else:
            total = cross_entropy(logits, labels, weights, **options, label_smoothing=smoothing, reduction="sum")
        weight = None if weights is None else self._weight_of(labels)
        return Loss(total, weight, logits=logits.detach(), targets=labels)

    def _of_labels(self, logits: Tensor, labels: Tensor) -> Tensor:
        import torch

        weights, gamma, smoothing = self._weights(logits), self.loss.focal_gamma, self.loss.label_smoothing
        smooth = labels * (1 - smoothing) + smoothing / 2
        function = torch.nn.functional.binary_cross_entropy_with_logits
        if not gamma:
            return function(logits, smooth, pos_weight=weights, reduction="sum")
        others = torch.sigmoid(logits * (1 - 2 * labels)).clamp_min(torch.finfo(logits.dtype).tiny)
        return (function(logits, labels, pos_weight=weights, reduction="none") * others**gamma).sum()

    def _require_labels(self, logits: Tensor, labels: Tensor) -> None:
        wanted, whole = tuple(logits.shape), not labels.is_floating_point()
        found = f"labels of shape {tuple(labels.shape)} and type {str(labels.dtype).removeprefix('torch.')}"
        if self.task in ("single_label", "token"):
            numbers = "for numbers use --model.task regression, for several labels a sample multi_label"
            fits = whole and tuple(labels.shape) == wanted[:-1]
            require(fits, f"model.task={self.task} needs classes, int64 {wanted[:-1]}, and gets {found}: {numbers}")
        else:
            numbers = "a number for each output" if self.task == "regression" else "0 or 1 for each label"
            fix = "for one class a sample use --model.task single_label"
            fits = tuple(labels.shape) == wanted
            require(fits, f"model.task={self.task} needs {numbers}, {wanted}, and gets {found}: {fix}")

    def _weight_of(self, labels: Tensor) -> Tensor:
        """The sum of the weights of the classes of ``labels``, in float64."""
        import torch

        weights = self._weights(labels, torch.float64)
        assert weights is not None
        return (weights[labels.clamp_min(0)] * (labels != IGNORED_LABEL)).sum()

    def _weights(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """The class weights where ``like`` is, copied there once: a copy in every micro-step would be waited for."""
        import torch

        if self.loss.class_weights is None:
            return None
        dtype = dtype or like.dtype
        copies = self.__dict__.setdefault("_copies", {})
        key = (like.device, dtype)
        found = copies.get(key)
        if found is None or type(like) is not torch.Tensor:  # one that only has a shape is no place to keep anything
            found = torch.tensor(self.loss.class_weights, dtype=dtype, device=like.device)
            if type(like) is torch.Tensor:
                copies[key] = found
        return found


def balanced_weights(task: Task, labels: Sequence[Any], classes: int, names: Sequence[str] | None) -> list[float]:
    """``balanced`` class weights, as :class:`Objective` says, of the labels of all training samples."""
    import numpy as np

    if task == "multi_label":
        table = np.asarray(labels, dtype=np.float64)
        counts, samples = table.sum(0), len(table)
    else:
        flat = np.fromiter(chain.from_iterable(labels), np.int64) if task == "token" else np.asarray(labels)
        flat = flat[flat != IGNORED_LABEL]
        counts, samples = np.bincount(flat, minlength=classes).astype(np.float64), len(flat)
    empty = [names[number] if names else str(number) for number, count in enumerate(counts) if not count]
    none = f"model.loss.class_weights=balanced: no training sample has the {CLASSES_OF[task]} {', '.join(empty[:1])}"
    require(not empty, f"{none}: give the weights as a list")
    return ((samples - counts) / counts if task == "multi_label" else samples / (classes * counts)).tolist()


def classification_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Cross entropy summed over the items whose label is not -100, computed in at least fp32.

    Args:
        logits: shape ``(items, classes)``.
        labels: int64, shape ``(items,)``.
    """
    import torch

    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    total = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return Loss(total, logits=logits.detach(), targets=labels)


def train_last_blocks(module: nn.Module, count: int, classes: Sequence[type] = ()) -> None:
    """Freeze every parameter that is registered before the last ``count`` blocks; what follows them, the head, trains.

    Raises:
        RecipeError: when the model has fewer blocks.
    """
    blocks = find_blocks(module, classes)
    if not 0 <= count <= len(blocks):
        raise RecipeError(f"model.train_last_blocks={count} must be between 0 and the number of blocks, {len(blocks)}")
    trained = {p for block in blocks[len(blocks) - count :] for p in block.parameters()}
    trained.update(head_parameters(module, blocks))
    for parameter in module.parameters():
        parameter.requires_grad_(parameter in trained)


def head_parameters(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters that are registered after all those of ``blocks``; none where there are no blocks."""
    in_blocks = {p for block in blocks for p in block.parameters()}
    parameters = list(module.parameters())
    last = max((at for at, parameter in enumerate(parameters) if parameter in in_blocks), default=len(parameters))
    return parameters[last + 1 :]


def require_filled(model: str, **fields: object) -> None:
    """Refuse to build while a field that the dataset should have filled is still ``None``, or is no size."""
    for name, value in fields.items():
        if value is None:
            fix = f"give --model.{name}"
            raise RecipeError(f"model.{name} of {model} is not set, and the dataset does not know it: {fix}")
        require_positive(f"model.{name}", value, MOST_FEATURES)
