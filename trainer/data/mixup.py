"""Mixup and CutMix: samples of a micro-batch mixed with their partners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.errors import RecipeError
from trainer.values import MixupDraw


def apply_mixup(batch: Any, row_indices: Sequence[int], partners: Sequence[int], mix: MixupDraw) -> dict[str, Tensor]:
    """Mix the rows ``row_indices`` of a collated batch with its rows ``partners``.

    ``pixel_values``, float ``(rows, channels, H, W)``, are mixed. ``mixed_labels`` are the partners' ``labels``, and
    ``lam``, float32 ``(n,)``, is the share of a sample's own label. The bits of a row do not depend on other rows.
    """
    pixels = batch.get("pixel_values") if isinstance(batch, Mapping) else None
    whole = isinstance(pixels, Tensor) and pixels.ndim == 4 and pixels.is_floating_point() and "labels" in batch
    if not whole or not all(isinstance(part, Tensor) and len(part) == len(batch["labels"]) for part in batch.values()):
        needed = "batches of tensors with one row per sample, pixel_values (n, channels, height, width) and labels"
        raise RecipeError(f"data.mixup and data.cutmix need {needed}: set them to 0 for other data")
    taken = {key: value[list(row_indices)] for key, value in batch.items()}
    mixing, others, share = taken["pixel_values"], batch["pixel_values"][list(partners)], mix.lam
    if mix.box_center is None:
        taken["pixel_values"] = mixing.mul_(share).add_(others.mul_(1 - share))
    else:
        rows, columns, share = cutmix_box(share, mix.box_center, *mixing.shape[2:])
        mixing[:, :, rows, columns] = others[:, :, rows, columns]
    return {**taken, "mixed_labels": batch["labels"][list(partners)], "lam": torch.full((len(row_indices),), share)}


def cutmix_box(lam: float, centre: tuple[float, float], height: int, width: int) -> tuple[slice, slice, float]:
    """Return rows and columns that CutMix takes from the partner, and the remaining share, in 256ths. The rectangle's
    sides are the image's times the root of 1 - ``lam``, clipped at the border (Yun et al. 2019)."""
    sides = zip(centre, (height, width), strict=True)
    cuts = [(int(place * size), int(size * (1 - lam) ** 0.5) // 2, size) for place, size in sides]
    rows, columns = (slice(max(0, middle - half), min(size, middle + half)) for middle, half, size in cuts)
    taken = (rows.stop - rows.start) * (columns.stop - columns.start)
    return rows, columns, round(256 * (1 - taken / (height * width))) / 256
