"""The state of training, tensor by tensor, by names that do not depend on strategy, offload or number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from trainer.checkpoint.parts import Part, whole
from trainer.memory.sharding import local
from trainer.memory.stack import Stack

PLAIN = (int, float, bool, str)


def weight_parts(stack: Stack) -> dict[str, Part]:
    """Weights and buffers: of this rank's shards under FSDP, in full precision where masters are on the host."""
    masters = stack.masters or {}
    parts = {f"weights/{name}": part_of(masters.get(p, p), p) for name, p in stack.module.named_parameters()}
    parts |= {f"buffers/{name}": whole(buffer) for name, buffer in stack.module.named_buffers()}
    return parts


def optimizer_parts(stack: Stack, optimizer: Optimizer) -> tuple[dict[str, Part], dict[str, Any]]:
    """The optimizer's state: its tensors, and what else there is, by ``optimizer/PARAMETER/KEY``."""
    parts: dict[str, Part] = {}
    values: dict[str, Any] = {}
    for name, parameter, trained in trained_parameters(stack, optimizer):
        for key, value in optimizer.state.get(trained, {}).items():
            full = f"optimizer/{name}/{key}"
            if isinstance(value, Tensor):
                parts |= _inner_parts(full, value, parameter, trained)
            elif value is None or isinstance(value, PLAIN):
                values[full] = value
            else:
                raise TypeError(f"{full} is a {type(value).__name__}: only tensors and numbers can be saved")
    return parts, values


def trained_parameters(stack: Stack, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    """Every parameter that the optimizer updates: its name, the module's parameter, and the tensor that is updated."""
    masters = stack.masters or {}
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in stack.module.named_parameters():
        trained = masters.get(parameter, parameter)
        if id(trained) in updated:
            yield name, parameter, trained


def part_of(value: Tensor, parameter: Tensor) -> Part:
    """``value`` as a part of a whole: the shard that the ``parameter`` it belongs to is, or all of it."""
    if not isinstance(parameter, DTensor) or value.shape not in (parameter.shape, parameter.to_local().shape):
        return whole(local(value))
    if value.ndim == 0:
        return whole(local(value))
    mesh = parameter.device_mesh
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
    at = mesh.get_coordinate() or ()
    copy = any(isinstance(p, Replicate) and place for p, place in zip(parameter.placements, at, strict=True))
    # A rank with a copy of another's shard has nothing to write.
    writer = -1 if copy else torch.distributed.get_rank()
    return Part(local(value), tuple(offset), tuple(parameter.shape), writer)


def _inner_parts(name: str, value: Tensor, parameter: nn.Parameter, trained: Tensor) -> dict[str, Part]:
    """One part, or those of a quantised tensor: codes, scales and code book, which fit only the same shard again."""
    part = part_of(value, parameter)
    inner = part.tensor
    if not hasattr(inner, "__tensor_flatten__"):
        return {name: part}
    shard = "x".join(f"{o}+{n}" for o, n in zip(part.offset, inner.shape, strict=True))
    names, _ = inner.__tensor_flatten__()
    return {
        f"{name}/{key}@{shard}": Part(tensor, (0,) * tensor.ndim, tuple(tensor.shape), part.writer)
        for key, tensor in ((key, getattr(inner, key)) for key in names)
    }
