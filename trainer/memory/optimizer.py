"""The optimizer: which parameters decay, which implementation runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.errors import RecipeError
from trainer.recipe import Optim, Precision

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
FUSED = ("adamw", "adam", "sgd", "adagrad")
FUSED_FOR_SHARDS = ("adamw", "adam")
"""Those whose fused kernels know FSDP's sharded tensors."""


def build_optimizer(
    parameters: Sequence[Tensor], optim: Optim, precision: Precision, device: torch.device
) -> Optimizer:
    """The optimizer over the ``parameters`` that train: weights on ``device``, or their masters in host memory.

    Matrices decay; biases and norm weights do not, for decay would pull scales to 0 (as in transformers and nanoGPT).

    Raises:
        RecipeError: when no parameter trains.
    """
    if not parameters:
        raise RecipeError("every parameter is frozen: raise model.train_last_blocks")
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": optim.lr}
    if optim.momentum:
        options["momentum"] = optim.momentum
    fused = FUSED_FOR_SHARDS if isinstance(parameters[0], DTensor) else FUSED
    # Fused kernels want to unscale fp16 gradients themselves, which clipping comes too late for.
    if optim.name in fused and precision != "16-mixed" and not (optim.name == "adagrad" and device.type != "cpu"):
        options["fused"] = True
    return OPTIMIZERS[optim.name]([group for group in groups if group["params"]], **options)
