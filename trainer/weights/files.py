"""Reading of weight files, without executing code from them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.errors import RecipeError, require
from trainer.system.text import format_names

PICKLED = (".pth", ".pt", ".bin")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a weight file, a pickle by ``weights_only``, to the CPU, memory-mapped; a bad one raises ``RecipeError``."""
    require(path.is_file(), f"{path} does not exist: give the path of a weight file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise RecipeError(f"{path} is corrupt or not a safetensors file: {error}") from error
    require(path.suffix in PICKLED, f"{path} is not a weight file: it must end in .safetensors, {', '.join(PICKLED)}")
    try:
        # Files of torch older than 1.6 are not zip archives and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a broken pickle can raise any exception
        reason = (str(error) or repr(error)).splitlines()[0]
        cause = f"{path} cannot be read safely, because it is corrupt or contains more than tensors ({reason})"
        raise RecipeError(f"{cause}: save only the state dict, preferably with safetensors") from error
    if not isinstance(content, Mapping):
        raise RecipeError(f"{path} contains a {type(content).__name__}, not a state dict: save tensors by name")
    others = [f"{name} ({type(item).__name__})" for name, item in content.items() if not isinstance(item, Tensor)]
    require(not others, f"{path} contains more than tensors, {format_names(others)}: save only the state dict")
    odd = [f"{name} ({kind})" for name, item in content.items() if (kind := _unsafe_reason(name, item))]
    require(not odd, f"{path} contains unsupported tensors, {format_names(odd)}: save plain, dense tensors by name")
    return {name: item.detach() for name, item in content.items()}


def _unsafe_reason(name: object, tensor: Tensor) -> str | None:
    if not isinstance(name, str):
        return "key is not a string"
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout is not torch.strided:
        return "sparse"
    return "without values" if tensor.is_meta else None
