"""Initialization: create weights in host memory in their final dtype and move them, or stream them in from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from lightning_fabric import Fabric
from torch import nn

from trainer.contract import Model, Streamable
from trainer.memory.plan import Plan
from trainer.memory.precision import weights_dtype
from trainer.weights.streaming import allocate, default_dtype, load_into, skeleton_on_meta

HOST = torch.device("cpu")


def build_module(fabric: Fabric, model: Model, seed: int, plan: Plan) -> nn.Module:
    """Build the module with its weights in their final place: the rank's device, host memory, or meta.

    They are created on the host in the dtype of the precision, so a ``seed`` gives the same weights on every rank.
    """
    dtype = weights_dtype(plan.memory)
    if plan.memory.init == "meta":
        assert isinstance(model, Streamable)  # a plan for other models is rejected
        return build_on_meta(model, seed, dtype)
    torch.manual_seed(seed)
    module = build_on_host(fabric, plan, model.build)
    in_half = weights_dtype(dataclasses.replace(plan.memory, cpu_offload="none"))
    if in_half != dtype:  # masters must round to the weights of a run without masters, and keep extra precision
        torch.manual_seed(seed)
        with default_dtype(in_half), HOST, torch.no_grad():
            # Random numbers drawn in half precision differ from rounded fp32 ones. Pretrained weights do not differ.
            for master, weight in zip(module.parameters(), model.build().parameters(), strict=True):
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight))
    return module.train()


def build_on_host(fabric: Fabric, plan: Plan, build: Callable[[], nn.Module]) -> nn.Module:
    """Call ``build`` in host memory, and move its module to :func:`weights_device` one tensor at a time."""
    with default_dtype(weights_dtype(plan.memory) or torch.float32), HOST:
        module = build()
    return module.to(weights_device(fabric, plan))


def weights_device(fabric: Fabric, plan: Plan) -> torch.device:
    """Return the device of whole weights: the host if they stay there or are sharded from there block by block."""
    cut = plan.strategy == "fsdp" or plan.memory.tensor_parallel > 1
    return HOST if cut or plan.memory.cpu_offload != "none" else fabric.device


def build_on_meta(model: Streamable, seed: int, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the ``skeleton`` of ``model`` in ``dtype``, with parameters on meta and real buffers on the CPU."""
    torch.manual_seed(seed)
    with default_dtype(dtype):
        return skeleton_on_meta(model).train()


def materialise(
    module: nn.Module, model: Streamable, device: torch.device, dtype: torch.dtype | None = None, seed: int = 0
) -> None:
    """Allocate the parameters of a ``module`` from :func:`build_on_meta` on ``device``, and fill them from files.

    The files are those that ``model`` names. Parameters that are in no file get the values that ``model.build`` draws
    with ``seed``. Without ``dtype``, the dtypes of the skeleton stay. Each rank allocates and reads only its slices (of
    DTensors after ``fully_shard``), one tensor at a time. Create the optimizer afterwards: parameters are new objects.
    """
    allocate(module, device, dtype)
    load_into(module, model, seed)
