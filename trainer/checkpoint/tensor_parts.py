"""The tensors of a checkpoint: parts of whole tensors, each in the file of the rank that had it.

The files are safetensors: a JSON header and bytes, without executable content. A JSON index lists the parts of every
tensor, so a checkpoint can be read with any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint.manifest import CorruptCheckpointError
from trainer.errors import RecipeError, RunError, require
from trainer.system.files import CHUNK

NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool}
NAMES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
NAMES |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
"""Dtypes by their names in safetensors."""

DTYPES = {dtype: name for name, dtype in NAMES.items()}


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one rank holds, on any device."""

    tensor: Tensor
    offset: tuple[int, ...]  # position of its first element in the whole tensor, by dimension
    shape: tuple[int, ...]  # shape of the whole tensor
    writer_rank: int | None = None  # the rank that writes it; None if every rank has the same part
    source_name: str | None = None  # name of the whole tensor, if the part has another name


def replicated_part(tensor: Tensor) -> TensorPart:
    """Return the part for a tensor that is whole and the same on every rank."""
    return TensorPart(tensor, (0,) * tensor.ndim, tuple(tensor.shape))


def assign_to_rank(parts: Mapping[str, TensorPart], rank: int, world_size: int) -> dict[str, TensorPart]:
    """Return the parts that ``rank`` writes: its own, and its share of those that every rank has."""
    own = {name: part for name, part in parts.items() if part.writer_rank == rank and part.tensor.numel()}
    loads = [0] * world_size
    for name in sorted(name for name, part in parts.items() if part.writer_rank is None):
        least = loads.index(min(loads))
        loads[least] += parts[name].tensor.nbytes
        if least == rank:
            own[name] = parts[name]
    return own


class HostStagingBuffers:
    """Copies in host memory, which is reused for the next copies: allocating takes longer than copying."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
        """Return copies of ``parts``, which overwrite earlier copies."""
        kinds = {name: (part.tensor.shape, part.tensor.dtype) for name, part in parts.items()}
        # Free buffers of the wrong shape or type first, so that there is never more than one copy of everything.
        self.kept = {name: old for name, old in self.kept.items() if (old.shape, old.dtype) == kinds.get(name)}
        for name, (shape, dtype) in kinds.items():
            if name not in self.kept:
                self.kept[name] = torch.empty(shape, dtype=dtype, pin_memory=parts[name].tensor.is_cuda)
            self.kept[name].copy_(parts[name].tensor)
        return {name: replace(part, tensor=self.kept[name]) for name, part in parts.items()}


def view_on_host(parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
    """Return ``parts`` in host memory. Tensors already there are not copied, so training must wait meanwhile."""
    return {name: replace(part, tensor=part.tensor.detach().cpu().contiguous()) for name, part in parts.items()}


def write_parts(
    path: Path, parts: Mapping[str, TensorPart], on_chunk: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Write ``parts`` (contiguous, in host memory) to the new safetensors file ``path``; return its bytes and SHA-256.

    The hash is computed from memory, so that it detects a disk that stores other bytes.
    """
    header, digest = _header(parts), hashlib.sha256()
    with open(path, "xb") as file, ThreadPoolExecutor(1) as hasher:
        for chunk in _chunks(header, parts):
            hashed = hasher.submit(digest.update, chunk)
            file.write(chunk)
            hashed.result()
            on_chunk()
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _header(parts: Mapping[str, TensorPart]) -> bytes:
    entries, end = {}, 0
    for name, part in parts.items():
        tensor, start = part.tensor, end
        if tensor.dtype not in DTYPES:
            raise RunError(f"{name} has dtype {tensor.dtype}, which safetensors does not support: use another dtype")
        end = start + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _chunks(header: bytes, parts: Mapping[str, TensorPart]) -> Iterator[memoryview]:
    yield memoryview(header)
    for part in parts.values():
        content = memoryview(part.tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(content), CHUNK):
            yield content[start : start + CHUNK]


def index_parts(file: str, parts: Mapping[str, TensorPart]) -> dict[str, Any]:
    """Return the JSON index of the parts in ``file``: for each tensor its whole shape, and for each part the file,
    offset, size, and its key in the file if that is not the name.
    """
    described: dict[str, Any] = {}
    for name, part in parts.items():
        place = {"file": file, "offset": list(part.offset), "size": list(part.tensor.shape)}
        place |= {"key": name} if part.source_name is not None else {}
        described.setdefault(part.source_name or name, {"shape": list(part.shape), "parts": []})["parts"].append(place)
    return described


class PartsReader:
    """Reads tensors, or slices of them, from a checkpoint ``folder``; ``indices`` has one index per writing rank."""

    def __init__(self, folder: Path, indices: Sequence[Mapping[str, Any]] = ()) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parts: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
        """The parts of every tensor, by file and key in the file."""
        self.files: dict[str, Any] = {}
        for index in indices:
            self.add_index(index)

    def add_index(self, index: Mapping[str, Any]) -> None:
        """Add the index of one more rank; an invalid one raises Value-, Type-, Lookup- or AttributeError."""
        for name, entry in index.items():
            shape = _counts(name, entry["shape"])
            if self.shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name} has shape {shape} on one rank, but {self.shapes[name]} on another")
            known = self.parts.setdefault(name, {})
            for part in entry["parts"]:
                offset, size = _counts(name, part["offset"]), _counts(name, part["size"])
                if not len(offset) == len(size) == len(shape):
                    raise ValueError(f"{name} has {len(shape)} dimensions, but a part {len(size)} at {len(offset)}")
                if any(start + length > most for start, length, most in zip(offset, size, shape, strict=True)):
                    raise ValueError(f"{name} has shape {shape}, but a part of shape {size} at {offset}")
                place = part["file"], part.get("key", name)
                if not all(isinstance(text, str) for text in place):
                    raise ValueError(f"{name} has a part in the file {part['file']!r}")
                if place in known:
                    raise ValueError(f"{name} has two parts in {part['file']}")
                known[place] = part

    @torch.no_grad()
    def read_into(self, name: str, target: TensorPart) -> None:
        """Fill the tensor of ``target``, a part of the tensor ``name``, in place; reject a wrong shape or a gap."""
        if self.shapes.get(name) != target.shape:
            found = f"has shape {self.shapes[name]}" if name in self.shapes else "is missing"
            raise RecipeError(f"{self.folder}: {name} {found}, but the model needs shape {target.shape}")
        filled = sum(self._copy(name, part, target) for part in self.parts[name].values())
        wanted = target.tensor.numel()
        require(filled == wanted, f"{self.folder}: {name} is incomplete: {filled} of {wanted} numbers were found")

    def read(self, name: str) -> Tensor:
        """Read the whole tensor ``name`` in its saved dtype, after checking that the files contain all of it."""
        stored = [self._stored(name, part) for part in self.parts[name].values()]
        there, wanted = sum(math.prod(part.get_shape()) for part in stored), math.prod(self.shapes[name])
        if there != wanted or not stored:
            raise CorruptCheckpointError(f"{self.folder}: {name} is incomplete: {there} of {wanted} numbers were found")
        tensor = torch.empty(self.shapes[name], dtype=NAMES[stored[0].get_dtype()])
        self.read_into(name, replicated_part(tensor))
        return tensor

    def _copy(self, name: str, part: Mapping[str, Any], target: TensorPart) -> int:
        there, here, count = [], [], 1
        for a, n, b, m in zip(part["offset"], part["size"], target.offset, target.tensor.shape, strict=True):
            start, end = max(a, b), min(a + n, b + m)
            there.append(slice(start - a, end - a))
            here.append(slice(start - b, end - b))
            count *= max(0, end - start)
        if count:
            target.tensor[tuple(here)].copy_(self._stored(name, part)[tuple(there)])
        return count

    def _stored(self, name: str, part: Mapping[str, Any]) -> Any:
        path = self.folder / part["file"]
        try:
            stored = self._open(part["file"]).get_slice(part.get("key", name))
        except SafetensorError as error:
            raise CorruptCheckpointError(f"{path} does not contain {name}: {error}") from error
        if stored.get_shape() != list(part["size"]):
            raise CorruptCheckpointError(f"{path} has {name} in shape {stored.get_shape()}, not {list(part['size'])}")
        return stored

    def _open(self, name: str) -> Any:
        if name not in self.files:
            path = self.folder / name
            if path.parent != self.folder:
                raise CorruptCheckpointError(f"{self.folder}: tensors must be in this folder, not in {name!r}")
            try:
                self.files[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CorruptCheckpointError(f"{path} is corrupt or not a safetensors file: {error}") from error
        return self.files[name]


def _counts(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{name} has {values!r} instead of a list of sizes")
    return tuple(values)
