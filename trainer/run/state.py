"""The state of training, tensor by tensor, by names that do not depend on strategy, offload or number of ranks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer.checkpoint.parts import Part, whole
from trainer.engine.events import Counters, Listener
from trainer.engine.order import derive_seed
from trainer.engine.step import Stepper, StepResult
from trainer.engine.sync import OverlappedSync, OverlappedWhereAllAreReached
from trainer.engine.window import Windows
from trainer.memory.sharding import local
from trainer.memory.stack import Stack
from trainer.run.listeners import Stopwatch

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


# What training has to remember besides tensors: where it is, and the small state of its parts. As JSON.

MOST_HALVINGS = 64
"""Of a micro-batch: none has 2 ** 64 samples."""


def common_state(counters: Counters, stepper: Stepper, windows: Windows, stopwatch: Stopwatch) -> dict[str, Any]:
    """The state that is the same on all ranks."""
    scaler = getattr(stepper.precision, "scaler", None)
    return {
        "counters": dataclasses.asdict(counters),
        "skipped_steps": stepper.skipped_steps,
        "scheduler": _schedule(stepper.scheduler),
        "scaler": scaler.state_dict() if scaler is not None else None,
        "overlapped": is_overlapped(stepper),
        "halvings": windows.halvings,
        "quarantine": windows.quarantine.to_dict(),
        "stopwatch": {"seconds": stopwatch.seconds, "samples": stopwatch.samples},
    }


def restore_common_state(
    state: Mapping[str, Any], counters: Counters, stepper: Stepper, windows: Windows, stopwatch: Stopwatch
) -> None:
    """Put ``state`` into parts that were made anew."""
    for name, value in state["counters"].items():
        setattr(counters, name, value)
    stepper.skipped_steps = state["skipped_steps"]
    _restore_schedule(state["scheduler"], stepper.scheduler)
    scaler = getattr(stepper.precision, "scaler", None)
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    sync = stepper.sync
    if state["overlapped"] and isinstance(sync, OverlappedWhereAllAreReached):
        sync.sync = OverlappedSync(sync.module, sync.parameters)
    if not 0 <= state["halvings"] < MOST_HALVINGS:
        raise ValueError(f"halvings is {state['halvings']}")
    while windows.halvings < state["halvings"]:
        windows.halve()
    windows.quarantine.restore(state["quarantine"])
    stopwatch.seconds, stopwatch.samples = state["stopwatch"]["seconds"], state["stopwatch"]["samples"]


def is_overlapped(stepper: Stepper) -> bool:
    """Whether DDP reduces while backward goes on, which it does from the second step on where it can."""
    sync = stepper.sync
    return isinstance(sync, OverlappedWhereAllAreReached) and isinstance(sync.sync, OverlappedSync)


def _schedule(scheduler: LRScheduler | None) -> dict[str, Any]:
    assert scheduler is not None
    return {
        "steps": scheduler.last_epoch,
        "computed": _computed(scheduler),
        "rates": [float(group["lr"]) for group in scheduler.optimizer.param_groups],
    }


def _computed(scheduler: LRScheduler) -> list[float]:
    """The rates that the schedule has for where it is, with all that was skipped so far."""
    assert isinstance(scheduler, LambdaLR)
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    return [float(base) * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]


def _restore_schedule(state: Mapping[str, Any], scheduler: LRScheduler | None) -> None:
    """The rates are those that were saved, unless the recipe now asks for others.

    Those that were saved may be older than the last skipped step, which the schedule takes into account at its next.
    """
    assert scheduler is not None
    scheduler.last_epoch = state["steps"]
    scheduler._step_count = state["steps"] + 1
    computed = _computed(scheduler)
    rates = state["rates"] if state["computed"] == computed else computed
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if hasattr(group["lr"], "fill_"):  # torchao's
            group["lr"].fill_(float(rate))
        else:
            group["lr"] = float(rate)
    scheduler._last_lr = [float(rate) for rate in rates]


# The state of the random generators of a process, as JSON.
#
# The engine seeds torch's generator before every micro-step and needs none of this. It is for models of one's own that
# draw from ``random``, NumPy or torch in between, and for datasets that do so in this process (``data.workers`` 0).


def seed_random_state(seed: int, rank: int) -> None:
    """Let every start of a run begin with the same generators, unlike on every rank."""
    random.seed(derive_seed(seed, rank, 0))
    np.random.seed(derive_seed(seed, rank, 1) % 2**32)
    torch.manual_seed(derive_seed(seed, rank, 2))


class RandomState(Listener):
    """The generators as they are between two steps, before the next batch is loaded: what a checkpoint keeps.

    When a step is saved the next batch is there already, and loading it may have drawn numbers. A run that goes on from
    there loads it again, and must draw the same.

    Args:
        device: whose generator is kept besides those of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resumed: Mapping[str, Any] | None = None
        """What to begin with: put back when training starts, after whatever was drawn in its preparation."""
        self._note()

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        if self.resumed is not None:
            restore_random_state(self.resumed, self.device)
        self._note()

    def on_step(self, counters: Counters, result: StepResult) -> None:
        self._note()

    def on_evaluation(self, counters: Counters, result: Any) -> None:
        self._note()

    def to_json(self) -> dict[str, Any]:
        """As :func:`restore_random_state` takes it."""
        (version, numbers, gauss), (name, keys, *rest), on_host, on_device = self._state
        state: dict[str, Any] = {
            "python": [version, list(numbers), gauss],
            "numpy": [name, np.asarray(keys).tolist(), *rest],
            "torch": _text(on_host),
        }
        return state if on_device is None else state | {"cuda": _text(on_device)}

    def _note(self) -> None:
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._state: Any = random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators into ``state``; that of a GPU only where there is one."""
    version, numbers, gauss = state["python"]
    if not isinstance(gauss, float | None):  # which Python believes
        raise TypeError(f"the generator's next number is {gauss!r}")
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
