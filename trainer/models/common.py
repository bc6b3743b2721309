"""What the models share: the classification loss, blocks, freezing. Torch is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.errors import RecipeError, require_positive
from trainer.values import IGNORED_LABEL, Loss
from trainer.weights.blocks import find_blocks

if TYPE_CHECKING:
    from torch import Tensor, nn

MOST_FEATURES = 10**7
"""Of a layer, classes or pixels: beyond it a size in bytes may not fit into 64 bits."""

MOST_LAYERS = 10_000
"""Each is made one by one."""


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


def mixed_loss(batch: Mapping[str, Any], loss_of: Callable[[Tensor], Loss]) -> Loss:
    """``loss_of(labels)`` of a micro-batch; of mixed samples (mixup, CutMix) that of both labels, each by its share.

    Whatever the loss is: smoothed, weighted by class, of several labels. ``lam`` is the same for all samples.
    """
    own = loss_of(batch["labels"])
    if "mixed_labels" not in batch:
        return own
    other = loss_of(batch["mixed_labels"])
    share = batch["lam"][0].to(own.total.dtype)
    weight = other.counted() + share.double() * (own.counted() - other.counted())  # exact where they are equal
    return replace(own, total=share * own.total + (1 - share) * other.total, weight=weight)


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
