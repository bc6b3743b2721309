"""Shared code of the models: tasks and their losses, blocks, freezing. Torch is imported on first use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.contract import Preparable, as_samples, mixed_sample_weights
from trainer.errors import RecipeError, require, require_choice, require_positive
from trainer.system.field_types import require_types
from trainer.values import IGNORED_LABEL, Loss, Task
from trainer.weights.blocks import find_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trainer.contract import Data

MAX_FEATURES = 10**7  # features, classes or pixels; above it a size in bytes may exceed 64 bits
MAX_LAYERS = 10_000  # each is built separately


ImageTask = Literal["single_label", "multi_label", "regression"]
Distance = Literal["mse", "mae", "huber"]


@dataclass(frozen=True)
class Objective:
    """The loss function of supervised tasks. The objective is torch's mean over the whole batch.

    Args:
        class_weights: one weight per class, in order, or balanced: samples / (classes × samples of the class) in the
            training data. The mean is divided by the sum of the labels' weights. For multi_label it is the weight of a
            positive label (torch's pos_weight), balanced is negative samples / positive samples of each label, and the
            mean is divided by the number of labels.
        label_smoothing: share of a label that is spread evenly over all classes (Szegedy et al. 2016); for
            multi_label, over positive and negative.
        focal_gamma: exponent of the focal loss (Lin et al. 2017): cross entropy times (1 - probability of the label)
            to the power of gamma, which gives less weight to easy samples; 0 is cross entropy.
        distance: for regression: mse, mae or huber, which is mse / 2 up to huber_delta and linear beyond.
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
        valid = weights in (None, "balanced")
        if not valid and not isinstance(weights, str):
            valid = all(0 <= weight < math.inf for weight in weights or ()) and any(weights or ())
        allowed = "must be balanced, or a list of numbers of at least 0, not all 0"
        require(valid, f"model.loss.class_weights={weights!r} {allowed}")
        require(0 <= smoothing < 1, f"model.loss.label_smoothing={smoothing} must be at least 0 and less than 1")
        require(0 <= gamma < math.inf, f"model.loss.focal_gamma={gamma} must be at least 0; the paper uses 2")
        given = f"model.loss.focal_gamma={gamma} and model.loss.label_smoothing={smoothing}"
        require(not (gamma and smoothing), f"{given} exclude each other: set one to 0")
        require(0 < self.huber_delta < math.inf, f"model.loss.huber_delta={self.huber_delta} must be greater than 0")

    def require_fit(self, task: Task) -> None:
        plain = Objective()
        of_classes = ("class_weights", "label_smoothing", "focal_gamma")
        for name in of_classes if task == "regression" else ("distance", "huber_delta"):
            value, unset = getattr(self, name), getattr(plain, name)
            if value != unset:
                fix = "leave it out" if task == "regression" else "use model.task regression, or leave it out"
                raise RecipeError(f"model.loss.{name}={value} has no effect for model.task={task}: {fix}")
        if self.distance != "huber" and self.huber_delta != plain.huber_delta:
            raise RecipeError(f"model.loss.huber_delta={self.huber_delta} is for model.loss.distance huber")


class SupervisedModel(Preparable):
    """Base class of models that learn from labels. It documents the settings that they share.

    Args:
        task: single_label, one class of several; multi_label, any number of labels; regression, one or more numbers;
            token, a class for each word of a text.
        loss: the loss function.
        num_classes: null takes the dataset's.
        class_names: null takes the dataset's; saved with the model.
    """

    task: Task
    loss: Objective
    num_classes: int | None
    class_names: list[str] | None

    def suited_to(self, data: Data) -> SupervisedModel:
        """Return this model with ``balanced`` class weights computed from the training labels of ``data``."""
        weights = self.loss.class_weights
        if weights is None:
            return self
        if weights == "balanced":
            labels = as_samples(data.train).labels
            if labels is None:
                cause = f"needs the training labels, and {type(data).__name__}'s train has no attribute labels"
                raise RecipeError(f"model.loss.class_weights=balanced {cause}: add it, or give the weights as a list")
            weights = balanced_weights(self.task, cast(Any, labels), self.num_classes or 0, self.class_names)
        given = f"model.loss.class_weights has {len(weights)} weights for {self.num_classes} classes"
        require(len(weights) == self.num_classes, f"{given}: give one for each")
        return replace(cast(Any, self), loss=replace(self.loss, class_weights=list(weights)))

    def weigh(self, batch: Any) -> dict[str, float]:
        """Return the divisor of torch's mean: the sum of class weights, or the number of samples, labels or words."""
        if "mixed_labels" in batch:
            return mixed_sample_weights(batch, self.weigh)
        if "labels" in batch and self.task == "regression":  # -100 is a regular value in regression
            return dict.fromkeys(self.loss_names, float(len(batch["labels"])))
        if "labels" in batch and self.task != "multi_label" and self.loss.class_weights is not None:
            return dict.fromkeys(self.loss_names, float(self._sum_class_weights(batch["labels"])))
        return super().weigh(batch)

    def loss_of_batch(self, logits: Tensor, batch: Mapping[str, Any]) -> Loss:
        """Return ``loss_of`` the micro-batch; for mixed samples (mixup, CutMix), any loss of both labels, by shares."""
        own = self.loss_of(logits, batch["labels"])
        if "mixed_labels" not in batch:
            return own
        other = self.loss_of(logits, batch["mixed_labels"])
        share = batch["lam"][0].to(own.total.dtype)
        weight = other.counted() + share.double() * (own.counted() - other.counted())  # exact if both are equal
        return replace(own, total=share * own.total + (1 - share) * other.total, weight=weight)

    def loss_of(self, logits: Tensor, labels: Tensor) -> Loss:
        """Return the loss of a micro-batch, computed in at least fp32.

        Args:
            logits: shape ``(n, classes)``; for tokens ``(n, length, classes)``.
            labels: integers, shape ``(n,)``, for tokens ``(n, length)``, -100 is ignored; for multi_label 0 or 1,
                shape ``(n, classes)``; for regression numbers, shape ``(n, outputs)`` or, with one output, ``(n,)``.
        """
        from torch.nn import functional

        logits = widened(logits)
        if self.task == "regression" and labels.ndim == 1:
            labels = labels[:, None]
        self._require_labels(logits, labels)
        if self.task in ("single_label", "token"):
            return self._classification_loss(logits.flatten(0, -2), labels.flatten())
        labels = labels.to(logits.dtype)
        shown: dict[str, Any] = {"logits": logits.detach(), "targets": labels}
        if self.task == "multi_label":
            return Loss(self._multi_label_loss(logits, labels), float(labels.numel()), **shown)
        huber = partial(functional.huber_loss, delta=self.loss.huber_delta)
        distances: dict[str, Any] = {"mse": functional.mse_loss, "mae": functional.l1_loss, "huber": huber}
        total = distances[self.loss.distance](logits, labels, reduction="sum")
        return Loss(total / logits.shape[-1], float(len(labels)), **shown)

    def _classification_loss(self, logits: Tensor, labels: Tensor) -> Loss:
        import torch

        weights, gamma, smoothing = self._weights(logits), self.loss.focal_gamma, self.loss.label_smoothing
        cross_entropy = partial(torch.nn.functional.cross_entropy, ignore_index=IGNORED_LABEL)
        if gamma:
            each = cross_entropy(logits, labels, reduction="none")
            # Clamp above 0, where a power with an exponent below 1 has no derivative.
            each = each * (-torch.expm1(-each)).clamp_min(torch.finfo(each.dtype).tiny) ** gamma
            total = (each if weights is None else each * weights[labels.clamp_min(0)]).sum()
        else:
            total = cross_entropy(logits, labels, weights, label_smoothing=smoothing, reduction="sum")
        weight = None if weights is None else self._sum_class_weights(labels)
        return Loss(total, weight, logits=logits.detach(), targets=labels)

    def _multi_label_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
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
            if not whole or tuple(labels.shape) != wanted[:-1]:
                fix = "for numbers use --model.task regression, for several labels per sample multi_label"
                raise RecipeError(f"model.task={self.task} needs classes, int64 {wanted[:-1]}, but got {found}: {fix}")
        else:
            numbers = "a number for each output" if self.task == "regression" else "0 or 1 for each label"
            if tuple(labels.shape) != wanted:
                cause = f"model.task={self.task} needs {numbers}, {wanted}, but got {found}"
                raise RecipeError(f"{cause}: for one class per sample use --model.task single_label")

    def _sum_class_weights(self, labels: Tensor) -> Tensor:
        import torch

        weights = self._weights(labels, torch.float64)
        assert weights is not None
        return (weights[labels.clamp_min(0)] * (labels != IGNORED_LABEL)).sum()

    def _weights(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the class weights on the device of ``like``. They are copied once: each copy would be a sync."""
        import torch

        if self.loss.class_weights is None:
            return None
        copies = self.__dict__.setdefault("_copies", {}) if type(like) is torch.Tensor else {}  # no fake tensors
        key = like.device, dtype or like.dtype
        if key not in copies:
            copies[key] = torch.tensor(self.loss.class_weights, dtype=key[1], device=key[0])
        return copies[key]


def balanced_weights(task: Task, labels: Sequence[Any], classes: int, names: Sequence[str] | None) -> list[float]:
    """Return ``balanced`` class weights (see :class:`Objective`) from the labels of all training samples."""
    import numpy as np

    if task == "multi_label":
        table = np.asarray(labels, dtype=np.float64)
        counts, samples = table.sum(0), len(table)
    else:
        flat = np.fromiter(chain.from_iterable(labels), np.int64) if task == "token" else np.asarray(labels)
        flat = flat[flat != IGNORED_LABEL]
        counts, samples = np.bincount(flat, minlength=classes).astype(np.float64), len(flat)
    empty = [names[number] if names else str(number) for number, count in enumerate(counts) if not count]
    if empty:
        cause = f"no training sample has the {'label' if task == 'multi_label' else 'class'} {empty[0]}"
        raise RecipeError(f"model.loss.class_weights=balanced: {cause}: give the weights as a list")
    return ((samples - counts) / counts if task == "multi_label" else samples / (classes * counts)).tolist()


def widened(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in at least fp32."""
    return tensor.float() if tensor.itemsize == 2 else tensor


def classification_loss(logits: Tensor, labels: Tensor) -> Loss:
    """Sum the cross entropy: ``logits`` (items, classes), int64 ``labels`` (items,) except -100, in fp32 or wider."""
    from torch.nn.functional import cross_entropy

    logits = widened(logits)
    total = cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return Loss(total, logits=logits.detach(), targets=labels)


def train_last_blocks(module: nn.Module, count: int, classes: Sequence[type] = ()) -> None:
    """Freeze every parameter registered before the last ``count`` blocks. Fewer blocks raise ``RecipeError``."""
    blocks = find_blocks(module, classes)
    if not 0 <= count <= len(blocks):
        raise RecipeError(f"model.train_last_blocks={count} must be between 0 and the number of blocks, {len(blocks)}")
    trained = {p for block in blocks[len(blocks) - count :] for p in block.parameters()}
    trained.update(parameters_after_blocks(module, blocks))
    for parameter in module.parameters():
        parameter.requires_grad_(parameter in trained)


def parameters_after_blocks(module: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that are registered after all those of ``blocks``; empty without blocks."""
    in_blocks = {p for block in blocks for p in block.parameters()}
    parameters = list(module.parameters())
    last = max((at for at, parameter in enumerate(parameters) if parameter in in_blocks), default=len(parameters))
    return parameters[last + 1 :]


def require_filled(model: str, **fields: object) -> None:
    """Check that fields that the dataset fills are set and are valid sizes."""
    for name, value in fields.items():
        unknown = "is not set and cannot be derived from the dataset"
        require(value is not None, f"model.{name} of {model} {unknown}: give --model.{name}")
        require_positive(f"model.{name}", value, MAX_FEATURES)
