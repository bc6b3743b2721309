"""The state of a run, with names that do not depend on the strategy or the number of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trainer.checkpoint.tensor_parts import TensorPart, replicated_part
from trainer.engine.events import Counters, Listener
from trainer.engine.loop import Engine
from trainer.engine.memory_rehearsal import init_optimizer_state
from trainer.engine.order import derive_seed
from trainer.engine.step import Stepper, StepResult
from trainer.memory.optimizer import OptimizerInBackward
from trainer.memory.sharding import local_shard
from trainer.memory.stack import PreparedModel
from trainer.run.best_tracker import BestTracker
from trainer.run.listeners import ThroughputMeter
from trainer.weights.streaming import find_packed_slices, local_slice


class TensorState:
    """Weights, buffers and optimizer state of this rank: its shards under FSDP, the masters if they are offloaded."""

    def __init__(self, stack: PreparedModel, stepper: Stepper, base: Collection[str] = ()) -> None:
        self.stack, self.stepper = stack, stepper
        self.base = {f"weights/{name}" for name in base}
        """Names of frozen weights that are not saved, because the files of the pretrained model have them."""

    def parts(self, saved: Collection[str] = ()) -> dict[str, TensorPart]:
        """Return the tensors as a checkpoint stores them, including those of ``base`` that are in ``saved``."""
        found: dict[str, TensorPart] = {}
        for name, value, parameter in self._named():
            if isinstance(value, Tensor) and (name not in self.base or name in saved):
                found |= _parts_of(name, value, parameter)
        for name, stretch in find_packed_slices(self.stack.module).items():
            for full in [full for full in found if f"/{name}/" in f"{full}/"]:
                part, whole_name = found[full], full.replace(name, stretch.name)
                if part.tensor.ndim:
                    offset, shape = stretch.to_packed(part.offset, part.shape)
                    found[full] = replace(part, source_name=whole_name, offset=offset, shape=shape)
                else:  # an optimizer scalar, the same for query, key and value
                    writer = -1 if stretch.number else part.writer_rank
                    found[full] = replace(part, source_name=whole_name, writer_rank=writer)
        return found

    def scalars(self) -> dict[str, Any]:
        return {name: value for name, value, _ in self._named() if not isinstance(value, Tensor)}

    @torch.no_grad()
    def on_host(self) -> dict[str, Any]:
        """Copy what training changes to CPU memory. No collective, so it works when the process group is broken."""
        frozen = {f"weights/{name}" for name, p in self.stack.module.named_parameters() if not p.requires_grad}
        return {
            name: local_shard(value).detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
            for name, value, _ in self._named()
            if name not in frozen
        }

    def make_state(self, saved: Collection[str]) -> None:
        """Create the optimizer's state, but only for parameters that have state among the names in ``saved``."""
        reached = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
        optimizer = self.stepper.optimizer
        if isinstance(optimizer, OptimizerInBackward):
            optimizer.init_state()
        elif reached:
            init_optimizer_state(optimizer)
        built = find_packed_slices(self.stack.module)
        for name, _, trained in self._trainable():
            if name not in reached and (name not in built or built[name].name not in reached):  # it had no gradient
                optimizer.state.pop(trained, None)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the values that ``state`` has. The optimizer's state must exist already."""
        for name, value, _ in self._named():
            if isinstance(value, Tensor) and name in state:
                local_shard(value).copy_(state[name])
        for name, _, trained in self._trainable():
            own = self.stepper.optimizer.state.get(trained, {})
            numbers = {key: f"optimizer/{name}/{key}" for key, value in own.items() if not isinstance(value, Tensor)}
            own |= {key: state[full] for key, full in numbers.items() if full in state}
        self.stack.copy_masters_to_device()

    def _named(self) -> Iterator[tuple[str, Any, nn.Parameter | None]]:
        """Yield every tensor and number, not copied, with its name and the parameter that defines its sharding. Names
        are ``weights/NAME``, ``ema/NAME``, ``buffers/NAME`` and ``optimizer/NAME/KEY``."""
        for name, parameter in self.stack.module.named_parameters():
            yield f"weights/{name}", (self.stack.masters or {}).get(parameter, parameter), parameter
        for name, buffer in self.stack.module.named_buffers():
            yield f"buffers/{name}", buffer, None
        for name, parameter, trained in self._trainable():
            if self.stack.averages is not None:
                yield f"ema/{name}", self.stack.averages.values[trained], parameter
            for key, value in self.stepper.optimizer.state.get(trained, {}).items():
                if not isinstance(value, Tensor | int | float | bool | str | None):
                    what = f"optimizer/{name}/{key} is a {type(value).__name__}"
                    raise TypeError(f"{what}: only tensors and numbers can be saved")
                yield f"optimizer/{name}/{key}", value, parameter

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield for every parameter that the optimizer updates: name, module parameter, updated tensor."""
        updated = set(map(id, self.stepper.parameters))
        for name, parameter in self.stack.module.named_parameters():
            trained = (self.stack.masters or {}).get(parameter, parameter)
            if id(trained) in updated:
                yield name, parameter, trained


def to_tensor_part(value: Tensor, parameter: Tensor | None) -> TensorPart:
    """Return ``value`` as part of a whole tensor: the same shard as its ``parameter``, or all of it."""
    shapes = (parameter.shape, parameter.to_local().shape) if isinstance(parameter, DTensor) else ()
    if not isinstance(parameter, DTensor) or value.ndim == 0 or value.shape not in shapes:
        return replicated_part(local_shard(value))
    mesh = parameter.device_mesh
    at = mesh.get_coordinate() or ()
    copy = any(isinstance(p, Replicate) and place for p, place in zip(parameter.placements, at, strict=True))
    copy = copy or not (mesh.mesh == 0).any()  # other data-parallel or tensor-parallel ranks hold the same shard
    writer = -1 if copy else torch.distributed.get_rank()  # -1: another rank writes this shard
    return TensorPart(local_shard(value), local_slice(parameter).offset, tuple(parameter.shape), writer)


def _parts_of(name: str, value: Tensor, parameter: nn.Parameter | None) -> dict[str, TensorPart]:
    """Return one part, or those of a quantised tensor (codes, scales, code book), which fit only the same shard."""
    part = to_tensor_part(value, parameter)
    inner = part.tensor
    if not hasattr(inner, "__tensor_flatten__"):
        return {name: part}
    shard = "x".join(f"{o}+{n}" for o, n in zip(part.offset, inner.shape, strict=True))
    names, _ = inner.__tensor_flatten__()
    parts = {key: replace(replicated_part(getattr(inner, key)), writer_rank=part.writer_rank) for key in names}
    return {f"{name}/{key}@{shard}": one for key, one in parts.items()}


@dataclass(frozen=True)
class RunState:
    """The parts of a run that a checkpoint stores in addition to the engine."""

    tensors: TensorState
    stopwatch: ThroughputMeter
    generators: RNGState
    best: BestTracker
    history: Callable[[], bytes]  # metrics.csv so far; called on the first rank only

    def common(self, engine: Engine) -> dict[str, Any]:
        """Return the state that is the same on all ranks, as JSON values."""
        return {**engine.state_dict(), "stopwatch": self.stopwatch.state_dict(), "best": self.best.state_dict()}

    def load_common(self, engine: Engine, state: Mapping[str, Any]) -> None:
        engine.load_state_dict(state)
        self.stopwatch.load_state_dict(state["stopwatch"])
        self.best.load_state_dict(state["best"])


# The random generators of a process. The engine seeds torch's before every micro-step and does not need this state. It
# is for custom models and datasets that draw from ``random``, NumPy or torch in this process.


def seed_random_state(seed: int, rank: int) -> None:
    """Seed the generators: the same at every start of a run, different on every rank."""
    random.seed(derive_seed(seed, rank, 0))
    np.random.seed(derive_seed(seed, rank, 1) % 2**32)
    torch.manual_seed(derive_seed(seed, rank, 2))


class RNGState(Listener):
    """The generators of the CPU and of ``device`` after a step, before the next batch was loaded. Loading may draw
    numbers, and a resumed run loads that batch again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resumed: Mapping[str, Any] | None = None
        """The state to set again when training starts, because preparing the training may draw numbers."""
        self._note()

    def on_fit_start(self, counters: Counters, total_steps: int) -> None:
        if self.resumed is not None:
            self.load_state_dict(self.resumed)
        self._note()

    def on_step(self, counters: Counters, result: StepResult) -> None:
        self._note()

    on_evaluation = on_step

    def state_dict(self) -> dict[str, Any]:
        (version, numbers, gauss), (name, keys, *rest), on_host, on_device = self._state
        state: dict[str, Any] = {"python": [version, list(numbers), gauss]}
        state |= {"numpy": [name, np.asarray(keys).tolist(), *rest], "torch": bytes(on_host.tolist()).hex()}
        return state if on_device is None else state | {"cuda": bytes(on_device.tolist()).hex()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators to ``state`` now and again when training starts; the GPU's only if there is a GPU."""
        self.resumed = state
        version, numbers, gauss = state["python"]
        if not isinstance(gauss, float | None):  # random.setstate accepts any type
            raise TypeError(f"the generator's next number is {gauss!r}")
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(torch.tensor(list(bytes.fromhex(state["cuda"])), dtype=torch.uint8), self.device)

    def _note(self) -> None:
        on_device = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._state: Any = random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device
