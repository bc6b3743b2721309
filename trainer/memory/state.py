"""What training has changed so far, kept in host memory while the model is built again on the same ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class Kept:
    """A tensor, or this rank's shard of one, in host memory; any other value as it is."""

    value: Any
    device: torch.device | None = None
    sharded: bool = False


@dataclass(frozen=True)
class TrainingState:
    """Weights that train, the optimizer's state and buffers, of this rank."""

    weights: list[Kept]
    state: list[dict[str, Kept]]
    rates: list[Any]
    buffers: dict[str, Kept]


@torch.no_grad()
def capture(module: nn.Module, optimizer: Optimizer) -> TrainingState:
    """Copy what training has changed. Runs no collective, so a rank can do it whose group is broken.

    Args:
        module: gives the buffers.
        optimizer: gives everything else; over master weights where the optimizer is offloaded.
    """
    parameters = _parameters(optimizer)
    return TrainingState(
        weights=[_keep(parameter) for parameter in parameters],
        state=[{key: _keep(value) for key, value in optimizer.state.get(p, {}).items()} for p in parameters],
        rates=[group["lr"] for group in optimizer.param_groups],
        buffers={name: _keep(buffer) for name, buffer in module.named_buffers()},
    )


@torch.no_grad()
def restore(state: TrainingState, module: nn.Module, optimizer: Optimizer) -> None:
    """Put ``state`` into a module and an optimizer that were made in the same way, on the same number of ranks."""
    for parameter, kept, own in zip(_parameters(optimizer), state.weights, state.state, strict=True):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(kept.value)
        if own:
            optimizer.state[parameter] = {key: _put_back(value, parameter) for key, value in own.items()}
    for group, rate in zip(optimizer.param_groups, state.rates, strict=True):
        group["lr"] = rate
    for name, buffer in module.named_buffers():
        buffer.copy_(state.buffers[name].value)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _keep(value: Any) -> Kept:
    if not isinstance(value, Tensor):
        return Kept(value)
    sharded = isinstance(value, DTensor)
    local = value.to_local() if isinstance(value, DTensor) else value
    return Kept(local.detach().to("cpu", copy=True), local.device, sharded)


def _put_back(kept: Kept, parameter: Tensor) -> Any:
    if kept.device is None:
        return kept.value
    value = kept.value.to(kept.device)
    if not (kept.sharded and isinstance(parameter, DTensor)):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())
