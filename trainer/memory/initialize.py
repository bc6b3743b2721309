"""Create weights in host memory, in the type that they will be used in, and move them; or stream them in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import nn

from trainer.contract import Model
from trainer.memory.plan import Plan
from trainer.memory.precision import weights_dtype
from trainer.weights.streaming import allocate, default_dtype, fill, skeleton_on_meta

HOST = torch.device("cpu")


def build_module(fabric: Fabric, model: Model, seed: int, plan: Plan) -> nn.Module:
    """``model.build()`` with its weights where they will live: on the rank's device, in host memory, or on meta. The
    host makes them, in the precision's type: a ``seed`` gives the same weights on every rank and device."""
    dtype = weights_dtype(plan.memory)
    if plan.memory.init == "meta":
        return build_on_meta(model, seed, dtype)
    torch.manual_seed(seed)
    module = built_at_home(fabric, plan, model.build)
    in_half = weights_dtype(dataclasses.replace(plan.memory, cpu_offload="none"))
    if in_half != dtype:  # masters round to the weights that the run has without them, and keep what they know beyond
        torch.manual_seed(seed)
        with default_dtype(in_half), HOST, torch.no_grad():
            # The numbers that are drawn in half precision are not those in fp32, rounded; pretrained ones are.
            for master, weight in zip(module.parameters(), model.build().parameters(), strict=True):
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))
    return module.train()


def built_at_home(fabric: Fabric, plan: Plan, build: Callable[[], nn.Module]) -> nn.Module:
    """What ``build`` makes in host memory, moved to :func:`home_of_weights` tensor by tensor: the host holds one copy
    meanwhile. ``memory.init=meta`` needs none."""
    with default_dtype(weights_dtype(plan.memory) or torch.float32), HOST:
        module = build()
    return module.to(home_of_weights(fabric, plan))


def home_of_weights(fabric: Fabric, plan: Plan) -> torch.device:
    """Where whole weights live: in host memory if they stay there, or are sharded from there block by block."""
    cut = plan.strategy == "fsdp" or plan.memory.tensor_parallel > 1
    return HOST if cut or plan.memory.cpu_offload != "none" else fabric.device


def build_on_meta(model: Model, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
    """The module of ``model``, which has a ``skeleton``, with parameters on meta and real buffers on the CPU; ``dtype``
    is of all floating-point ones. It may be sharded before :func:`materialise`."""
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
        module: what :func:`build_on_meta` made of ``model``.
        model: says where its weights come from.
        device: where parameters live: the CPU when they are offloaded.
        dtype: as for :func:`build_on_meta`; ``None`` leaves what the skeleton has.
        seed: of the parameters that no file has; the values are those that ``model.build`` draws for it.

    Raises:
        RecipeError: naming what the files lack, have in another shape, or what is still on meta.
    """
    allocate(module, device, dtype)
    fill(module, model, seed)
