"""Create weights where and in the type that they will be used, or stream them there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from trainer.contract import Model
from trainer.memory.plan import Plan
from trainer.memory.precision import weights_dtype
from trainer.streaming import allocate, default_dtype, fill, skeleton_on_meta


def build_module(fabric: Fabric, model: Model, seed: int, plan: Plan) -> nn.Module:
    """The module of ``model`` as ``memory.init`` says; the same ``seed`` gives every rank the same weights."""
    if plan.memory.init == "meta":
        return build_on_meta(model, seed, weights_dtype(plan.memory))
    return build_on_device(fabric, model, seed, plan)


def build_on_device(fabric: Fabric, model: Model, seed: int, plan: Plan | None = None) -> nn.Module:
    """``model.build()`` where the weights will live: on the rank's device, or in host memory when ``plan`` says so.

    On the device they have the precision's type at once: no copy in host memory, no cast afterwards. (A GPU draws other
    random weights from the same seed than the host.)
    """
    torch.manual_seed(seed)
    with home_of_weights(fabric, plan):
        module = model.build()
    return module.train()


def home_of_weights(fabric: Fabric, plan: Plan | None) -> AbstractContextManager[Any]:
    """A context in which tensors are created on the device, or in host memory, where ``plan`` will keep weights."""
    if plan is None or plan.memory.cpu_offload == "none":
        return fabric.init_module(empty_init=False)
    return _on_host(plan)


@contextmanager
def _on_host(plan: Plan) -> Iterator[None]:
    with default_dtype(weights_dtype(plan.memory) or torch.float32), torch.device("cpu"):
        yield


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
