"""Files of weights, read without ever executing what is in them."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.errors import RecipeError, require

PICKLED = (".pth", ".pt", ".bin")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a file of weights to the CPU, memory-mapped: ``.safetensors``, or ``.pth``, ``.pt`` or ``.bin``: pickles, of
    which ``weights_only`` executes nothing. A ``RecipeError`` if it is missing, corrupt, or holds no named tensors."""
    require(path.is_file(), f"{path} is not there: give the path of a weight file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise RecipeError(f"{path} is corrupt or not a safetensors file: {error}") from error
    require(path.suffix in PICKLED, f"{path} is not a weight file: it must end in .safetensors, {', '.join(PICKLED)}")
    try:
        # Files from before torch 1.6 are no zip archives and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a broken pickle can make the unpickler stumble over anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise RecipeError(
            f"{path} cannot be read safely, it is corrupt or holds more than tensors: "
            f"save the state dict alone, best with safetensors ({reason})"
        ) from error
    require(isinstance(content, Mapping), f"{path} holds a {type(content).__name__}, not a state dict: tensors by name")
    others = [f"{name} ({type(item).__name__})" for name, item in content.items() if not isinstance(item, Tensor)]
    require(not others, f"{path} holds more than tensors: {shortened(others)}. Save the state dict alone")
    odd = [f"{name} ({kind})" for name, item in content.items() if (kind := _oddity(name, item))]
    require(not odd, f"{path} holds what no module can load: {shortened(odd)}. Save plain, dense tensors by name")
    return {name: item.detach() for name, item in content.items()}


def _oddity(name: object, tensor: Tensor) -> str | None:
    if not isinstance(name, str):
        return "not under a name"
    if type(tensor) not in (Tensor, nn.Parameter):
        return type(tensor).__name__
    if tensor.is_quantized:
        return "quantised"
    if tensor.layout is not torch.strided:
        return "sparse"
    return "without values" if tensor.is_meta else None


def shortened(names: Collection[str]) -> str:
    """The first three names, and how many more there are."""
    first = list(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
