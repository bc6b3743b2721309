"""``memory.init``: weights created where and in the type that they will be used, or streamed into nothing."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import nn

from trainer.contract import Model
from trainer.streaming import allocate, default_dtype, fill, skeleton_on_meta


def build_on_device(fabric: Fabric, model: Model, seed: int) -> nn.Module:
    """``model.build()`` on the rank's device in the precision's type: no copy in host memory, no cast afterwards.

    The same ``seed`` on every rank gives every rank the same weights.
    """
    torch.manual_seed(seed)
    with fabric.init_module(empty_init=False):
        module = model.build()
    return module.train()


def build_on_meta(model: Model, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
    """The module of ``model`` with parameters on meta, which need no memory, and real buffers on the CPU.

    Shard it if you like, then :func:`materialise` it.

    Args:
        model: with ``skeleton`` and ``pretrained``.
        seed: of buffers, if any are random.
        dtype: of floating-point parameters and buffers (``weights_dtype`` of the precision); ``None`` is torch's
            default.

    Raises:
        RecipeError: when the model has no ``skeleton``.
    """
    torch.manual_seed(seed)
    with default_dtype(dtype):
        return skeleton_on_meta(model).train()


def materialise(
    module: nn.Module, model: Model, device: torch.device, dtype: torch.dtype | None = None, seed: int = 0
) -> None:
    """Allocate the parameters of ``module`` on ``device`` and fill them from the files that ``model`` names, in place.

    Parameters may be plain tensors or DTensors (after ``fully_shard``): each rank allocates and reads its slices only,
    tensor by tensor. An optimizer must be made afterwards: the parameters are other objects than before.

    Args:
        module: from :func:`build_on_meta`.
        model: the same.
        device: where parameters live: the CPU when they are offloaded.
        dtype: as for :func:`build_on_meta`; ``None`` leaves what the skeleton has.
        seed: of the parameters that no file has; the values are those that ``build_on_device`` draws for it.

    Raises:
        RecipeError: naming what the files lack, have in another shape, or what is still on meta.
    """
    allocate(module, device, dtype)
    fill(module, model, seed)
