"""Model and optimizer filled from a checkpoint, each rank with what it holds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint.manifest import MOST_BYTES, CorruptCheckpoint, Manifest
from trainer.checkpoint.parts import Part, PartsReader
from trainer.checkpoint.writer import HISTORY, sign_of
from trainer.contract import Model
from trainer.engine.rehearsal import make_state
from trainer.engine.step import Stepper
from trainer.errors import RecipeError, RunError, require
from trainer.memory.optimizer_in_backward import OptimizerInBackward
from trainer.memory.sharding import local
from trainer.memory.stack import Stack
from trainer.state_parts import optimizer_parts, trained_parameters, weight_parts
from trainer.system.files import read_regular

MOST_HISTORY = 2 * 2**30
"""Bytes of ``metrics.csv``: some hundred a step."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that was found to be what was saved."""

    path: Path
    manifest: Manifest

    def json(self, name: str) -> Any:
        """The content of one of its JSON files."""
        with self.explained(name):
            return json.loads(read_regular(self.path / name, MOST_BYTES))

    @contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Say that the file ``name`` is what cannot be used. Its hash is right, but anybody can write a manifest.

        Raises:
            CorruptCheckpoint: naming the file.
        """
        try:
            yield
        except (RecipeError, RunError):
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise CorruptCheckpoint(
                f"{self.path / name} holds something else than a run has written: {what}"
            ) from error

    def history(self) -> bytes:
        """``metrics.csv`` as it was then."""
        with self.explained(HISTORY):
            content = read_regular(self.path / HISTORY, MOST_HISTORY)
            content.decode()  # what is no text could not be gone on with
            return content


@torch.no_grad()
def restore_tensors(found: Found, stack: Stack, stepper: Stepper) -> None:
    """Fill the model and the optimizer from the checkpoint: every rank reads what it holds, wherever that was saved.

    Raises:
        RecipeError: naming the tensor that is missing, of another shape, or not needed.
    """
    reader, values = _open(found)
    optimizer = stepper.optimizer
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.make_state()
    else:
        make_state(optimizer)
    _forget_unreached(stack, stepper, {*reader.shapes, *values})
    wanted = weight_parts(stack)
    of_optimizer, own_values = optimizer_parts(stack, optimizer)
    wanted |= of_optimizer
    _require_all(found, reader, wanted)
    for name, part in wanted.items():
        reader.read_into(name, part)
    with found.explained(sign_of(0)):
        for name, own in own_values.items():
            if isinstance(own, int | float) and not isinstance(values[name], int | float):
                raise TypeError(f"{name} is {values[name]!r}")
    for name, _, trained in trained_parameters(stack, optimizer):
        state = optimizer.state.get(trained, {})
        state |= {key: values[f"optimizer/{name}/{key}"] for key in state if f"optimizer/{name}/{key}" in own_values}
    for parameter, master in (stack.masters or {}).items():
        local(parameter).copy_(master)


def load_whole_model(found: Found, model: Model) -> nn.Module:
    """The module of ``model`` in host memory, with the weights and buffers of the checkpoint in the types saved there.

    Raises:
        RecipeError: naming what is missing.
    """
    reader, _ = _open(found)
    module = model.unloaded().build()
    wanted: dict[str, Tensor] = {f"weights/{name}": parameter for name, parameter in module.named_parameters()}
    wanted |= {f"buffers/{name}": buffer for name, buffer in module.named_buffers()}
    missing = sorted(wanted.keys() - reader.shapes.keys())
    require(not missing, f"{found.path} does not fit the model: missing: {', '.join(missing[:3])}")
    for name, tensor in wanted.items():
        require(
            reader.shapes[name] == tuple(tensor.shape),
            f"{found.path} does not fit the model: {name} is of shape {reader.shapes[name]}, not {tuple(tensor.shape)}",
        )
        with found.explained(reader.parts[name][0]["file"] if reader.parts.get(name) else sign_of(0)):
            tensor.data = reader.read(name)
    return module


def _open(found: Found) -> tuple[PartsReader, dict[str, Any]]:
    """A reader of the tensors of all ranks that saved the checkpoint, and the numbers beside them."""
    reader, values = PartsReader(found.path), dict[str, Any]()
    for rank in range(found.manifest.world_size):
        with found.explained(sign_of(rank)):
            sign = found.json(sign_of(rank))
            reader.add(sign["tensors"])
            values.update(sign["values"])
    return reader, values


def _forget_unreached(stack: Stack, stepper: Stepper, saved: set[str]) -> None:
    """A parameter that no gradient had reached had no state."""
    known = {name.split("/")[1] for name in saved if name.startswith("optimizer/")}
    for name, _, trained in trained_parameters(stack, stepper.optimizer):
        if name not in known:
            stepper.optimizer.state.pop(trained, None)


def _require_all(found: Found, reader: PartsReader, wanted: Mapping[str, Part]) -> None:
    """Under several ranks each holds some parts of quantised state, so only what is missing here can be told."""
    missing = sorted(wanted.keys() - reader.shapes.keys())
    quantised = [name for name in missing if "@" in name]
    require(
        not quantised,
        f"{found.path}: the optimizer's state of 8 or 4 bits was quantised in other shards: resume with the "
        f"memory.strategy and the number of ranks ({found.manifest.world_size}) that it was saved with",
    )
    surplus = sorted(name for name in reader.shapes.keys() - wanted.keys() if "@" not in name)
    require(
        not missing and not surplus,
        f"{found.path} does not fit the model and its optimizer: "
        + "; ".join(
            f"{what}: {', '.join(names[:3])}" for what, names in (("missing", missing), ("left over", surplus)) if names
        ),
    )


def require_alike(found: Any, own: Any, where: str = "it") -> None:
    """Check that JSON is of the kinds that this run would write: a hash that fits does not say who has made it.

    Args:
        found: what was read.
        own: what this run would write in its place; of a list the first item stands for all, and ``None`` for anything.
        where: its name, for the message.

    Raises:
        ValueError: naming what is of another kind.
    """
    if own is None or (isinstance(own, Mapping) and found is None):  # of a part that only one of the two runs has
        return
    if isinstance(own, Mapping):
        fits = isinstance(found, dict) and found.keys() >= own.keys()
        for key in own if fits else ():
            require_alike(found[key], own[key], f"{where}.{key}" if where != "it" else key)
    elif isinstance(own, list):
        fits = isinstance(found, list)
        for item in found if fits and own else ():
            require_alike(item, own[0], f"an item of {where}")
    elif isinstance(own, float):
        fits = type(found) in (int, float) and math.isfinite(found)
    else:
        fits = type(found) is type(own) and (type(found) is not int or 0 <= found < 2**63)
    if not fits:
        raise ValueError(f"{where} is {str(found)[:40]!r}, not {type(own).__name__}")
