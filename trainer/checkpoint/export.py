"""A trained model as a folder of ``model.safetensors`` and ``config.json``, and weights read from files."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.checkpoint.manifest import MOST_BYTES, seal_folder
from trainer.contract import Exportable, capability
from trainer.errors import require
from trainer.system.files import errno_of, read_object, staged_file, write_atomic
from trainer.system.redact import redact_value
from trainer.weights.blocks import as_it_came
from trainer.weights.files import read_weights, shortened

if TYPE_CHECKING:
    from trainer.contract import Model

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_model(model: Model, module: nn.Module, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the unwrapped ``module`` to ``folder`` so that :func:`load_model` restores it.

    That is its weights (``state``, whole; by default those of the module, which is not sharded then) and the fields of
    ``model``, or what a model with ``own_format`` makes of it, and the hashes of all that. Tied tensors are written
    once, under the first of their names.
    """
    state = module.state_dict() if state is None else state
    try:
        exported = capability(model, Exportable)
        if exported.own_format:
            with as_it_came(module):
                exported.save(module, folder, state)
        else:
            with staged_file(folder / WEIGHTS) as part:
                save_file(_unique_tensors(exported.merged_state(module, state)), part, metadata={"format": "pt"})
            config = json.dumps(_config(model), indent=2, allow_nan=False, ensure_ascii=False)
            write_atomic(folder / CONFIG, f"{config}\n")
    except SafetensorError as error:  # of the disk; its text has the error's name, but not its number
        raise OSError(errno_of(error) or errno.EIO, str(error), str(folder / WEIGHTS)) from error
    seal_folder(folder)


def load_model(model: Model, folder: Path) -> nn.Module:
    """Build the module of ``model`` on the current default device, with the weights that are in ``folder``; a
    ``RecipeError`` says that they are missing, corrupt or those of another model."""
    if isinstance(model, Exportable):
        if model.own_format:
            return model.saved_in(folder).build()
        model = model.merged()
    if model.weights is not None:  # pretrained ones would be fetched only to be overwritten
        model = dataclasses.replace(model, weights=None)  # type: ignore[type-var]
    module = model.build()
    load_weights(module, folder / WEIGHTS)
    return module


def filled_as_saved(model: Model, folder: Path) -> Model:
    """``model`` with its open fields as the model in ``folder`` has them, which was filled from its data; one with
    ``own_format`` takes all that it reads from there."""
    if isinstance(model, Exportable) and model.own_format:
        return model.saved_in(folder)
    saved = read_object(folder / CONFIG, MOST_BYTES).get("fields", {})
    own: Any = dataclasses.fields(model) if dataclasses.is_dataclass(model) else ()
    open_fields = [field.name for field in own if field.init and getattr(model, field.name) is None]
    given = {name: saved[name] for name in open_fields if saved.get(name) is not None}
    return dataclasses.replace(model, **given) if given else model  # type: ignore[type-var]


def load_weights(module: nn.Module, path: Path) -> None:
    """Copy the weights of the file ``path`` into ``module``: all of them, and nothing left over.

    Raises:
        RecipeError: naming the file and what is missing, unexpected or of another shape; ``module`` is then unchanged.
    """
    found, expected = read_weights(path), module.state_dict()
    present = {_identity(expected[name]) for name in expected.keys() & found.keys()}
    faults = {
        "missing": [n for n, tensor in expected.items() if n not in found and _identity(tensor) not in present],
        "unexpected": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in found and found[name].shape != tensor.shape
        ],
    }
    text = "; ".join(f"{fault}: {shortened(names)}" for fault, names in faults.items() if names)
    require(not text, f"{path} does not fit the model, were they made with the same settings? {text}")
    module.load_state_dict(found, strict=False)


def _unique_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU; of those that are the same memory only the first."""
    unique: dict[tuple, str] = {}
    for name, tensor in state.items():
        unique.setdefault(_identity(tensor), name)
    return {name: _own_memory(state[name]) for name in unique.values()}


def _identity(tensor: Tensor) -> tuple:
    """Equal for two tensors that are one: the same memory, looked at in the same way."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _own_memory(tensor: Tensor) -> Tensor:
    """A CPU tensor as safetensors wants it: contiguous, and no part of another's memory."""
    tensor = tensor.detach().cpu()
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _config(model: Any) -> dict[str, Any]:
    kind = type(model)
    names = [field.name for field in dataclasses.fields(model)] if dataclasses.is_dataclass(model) else []
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "fields": {name: redact_value(getattr(model, name), name) for name in names if _is_json(getattr(model, name))},
    }


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
