"""Export of a trained model to ``model.safetensors`` and ``config.json``, and loading of such a folder."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.checkpoint.manifest import MAX_JSON_BYTES, write_hashes
from trainer.contract import Exportable, Model, capability, without_weights
from trainer.errors import require
from trainer.system.files import errno_of, read_json_object, staged_file, write_atomic
from trainer.system.redact import redact_value
from trainer.system.text import format_names
from trainer.weights.blocks import kv_cache_restored
from trainer.weights.files import read_weights

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_model(model: Model, module: nn.Module, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the unwrapped ``module`` to ``folder`` so that :func:`load_model` restores it.

    Writes the weights (whole ``state``; by default those of the module, not sharded), the fields of ``model`` or, for
    ``own_format``, its own files, and their hashes. Tied tensors are written once, under the first of their names.
    """
    state = module.state_dict() if state is None else state
    try:
        exported = capability(model, Exportable)
        if exported.own_format:
            with kv_cache_restored(module):
                exported.save(module, folder, state)
        else:
            with staged_file(folder / WEIGHTS) as part:
                save_file(_unique_tensors(exported.merged_state(module, state)), part, metadata={"format": "pt"})
            config = json.dumps(_config(model), indent=2, allow_nan=False, ensure_ascii=False)
            write_atomic(folder / CONFIG, f"{config}\n")
    except SafetensorError as error:  # a disk error; its text has the name of the error, but not its number
        raise OSError(errno_of(error) or errno.EIO, str(error), str(folder / WEIGHTS)) from error
    write_hashes(folder)


def load_model(model: Model, folder: Path) -> nn.Module:
    """Build the module of ``model`` on the current default device and load its checked weights from ``folder``."""
    if isinstance(model, Exportable):
        if model.own_format:
            return model.saved_in(folder).build()
        model = model.merged()
    module = without_weights(model).build()  # do not fetch pretrained weights that are overwritten
    load_weights(module, folder / WEIGHTS)
    return module


def restore_open_fields(model: Model, folder: Path) -> Model:
    """Return ``model`` with open fields (``None``) as in ``folder``; one with ``own_format`` takes all from there."""
    if isinstance(model, Exportable) and model.own_format:
        return model.saved_in(folder)
    saved = read_json_object(folder / CONFIG, MAX_JSON_BYTES).get("fields", {})
    own: Any = dataclasses.fields(model) if dataclasses.is_dataclass(model) else ()
    open_fields = [field.name for field in own if field.init and getattr(model, field.name) is None]
    given = {name: saved[name] for name in open_fields if saved.get(name) is not None}
    return dataclasses.replace(model, **given) if given else model  # type: ignore[type-var]


def load_weights(module: nn.Module, path: Path) -> None:
    """Copy the weights of ``path`` into ``module``; without the same names and shapes, raise and leave it unchanged."""
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
    text = "; ".join(f"{fault}: {format_names(names)}" for fault, names in faults.items() if names)
    require(not text, f"{path} does not fit the model ({text}): use the settings that it was trained with")
    module.load_state_dict(found, strict=False)


def _unique_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU; of tensors that share their memory, only the first."""
    unique: dict[tuple, str] = {}
    for name, tensor in state.items():
        unique.setdefault(_identity(tensor), name)
    return {name: _own_memory(state[name]) for name in unique.values()}


def _identity(tensor: Tensor) -> tuple:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _own_memory(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as safetensors needs it: on the CPU, contiguous, and not a part of a larger storage."""
    tensor = tensor.detach().cpu()
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _config(model: Any) -> dict[str, Any]:
    kind = type(model)
    names = [field.name for field in dataclasses.fields(model)] if dataclasses.is_dataclass(model) else []
    fields = {name: redact_value(getattr(model, name), name) for name in names if _is_json(getattr(model, name))}
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "fields": fields}


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
