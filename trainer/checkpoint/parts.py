"""Tensors as a checkpoint keeps them: parts of whole ones, each in the file of the rank that had it.

A file is safetensors: a header in JSON and the bytes, nothing that could be executed. Which part of which tensor it is
stands beside it in JSON, so that any number of ranks can read what any other number has written.
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

from trainer.checkpoint.manifest import CorruptCheckpoint
from trainer.errors import RecipeError, RunError

NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "BOOL": torch.bool}
NAMES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
NAMES |= {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
"""Types by the names that safetensors has for them."""

DTYPES = {dtype: name for name, dtype in NAMES.items()}

CHUNK = 16 * 2**20
"""Bytes that are written and hashed at once."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of a tensor, on any device."""

    tensor: Tensor
    offset: tuple[int, ...]  # where it begins in the whole tensor, one number a dimension
    shape: tuple[int, ...]  # of the whole tensor
    writer: int | None = None  # the rank that writes it, None for one that every rank has the same of
    of: str | None = None  # the name of the whole tensor, where this part has another one


def whole(tensor: Tensor) -> Part:
    """A tensor that every rank has the same of."""
    return Part(tensor, (0,) * tensor.ndim, tuple(tensor.shape))


def share_out(parts: Mapping[str, Part], rank: int, world_size: int) -> dict[str, Part]:
    """What ``rank`` writes: its own parts, and its share of those that every rank has; all agree on the shares."""
    own = {name: part for name, part in parts.items() if part.writer == rank and part.tensor.numel()}
    loads = [0] * world_size
    for name in sorted(name for name, part in parts.items() if part.writer is None):
        least = loads.index(min(loads))
        loads[least] += parts[name].tensor.nbytes
        if least == rank:
            own[name] = parts[name]
    return own


class HostCopies:
    """Copies in host memory, which training does not change any more. Their memory is kept for the next ones: to get
    fresh memory from the system takes longer than to copy."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def of(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Copies of ``parts``; those that were made before are written over."""
        kinds = {name: (part.tensor.shape, part.tensor.dtype) for name, part in parts.items()}
        # What does not fit any more is given back first: never more than one copy of everything.
        self.kept = {name: old for name, old in self.kept.items() if (old.shape, old.dtype) == kinds.get(name)}
        for name, (shape, dtype) in kinds.items():
            if name not in self.kept:
                self.kept[name] = torch.empty(shape, dtype=dtype, pin_memory=parts[name].tensor.is_cuda)
            self.kept[name].copy_(parts[name].tensor)
        return {name: replace(part, tensor=self.kept[name]) for name, part in parts.items()}


def on_host(parts: Mapping[str, Part]) -> dict[str, Part]:
    """``parts`` in host memory: the tensors themselves where they are there, so training must wait meanwhile."""
    return {name: replace(part, tensor=part.tensor.detach().cpu().contiguous()) for name, part in parts.items()}


def write_parts(path: Path, parts: Mapping[str, Part], on_chunk: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Write ``parts`` (contiguous, in host memory) to the new safetensors file ``path`` and to the disk.

    Returns:
        ``{"bytes": its size, "sha256": the hash of what was to be written}``: the hash is made of the memory, while the
        file is written, so that a disk that writes something else is found out.
    """
    header, digest = _header(parts), hashlib.sha256()
    with open(path, "xb") as file, ThreadPoolExecutor(1) as beside:
        for chunk in _chunks(header, parts):
            hashed = beside.submit(digest.update, chunk)
            file.write(chunk)
            hashed.result()
            on_chunk()
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _header(parts: Mapping[str, Part]) -> bytes:
    entries, end = {}, 0
    for name, part in parts.items():
        tensor, start = part.tensor, end
        if tensor.dtype not in DTYPES:
            raise RunError(f"{name} is of {tensor.dtype}, which safetensors has no name for: use another type")
        end = start + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of eight bytes
    return len(text).to_bytes(8, "little") + text


def _chunks(header: bytes, parts: Mapping[str, Part]) -> Iterator[memoryview]:
    yield memoryview(header)
    for part in parts.values():
        content = memoryview(part.tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(content), CHUNK):
            yield content[start : start + CHUNK]


def describe_parts(file: str, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Where the parts in ``file`` belong, as JSON: by name, the whole shape, and file, offset and size of each part,
    and its key in the file where that is not the name."""
    described: dict[str, Any] = {}
    for name, part in parts.items():
        place = {"file": file, "offset": list(part.offset), "size": list(part.tensor.shape)}
        place |= {"key": name} if part.of is not None else {}
        entry = described.setdefault(part.of or name, {"shape": list(part.shape), "parts": []})
        entry["parts"].append(place)
    return described


class PartsReader:
    """Reads tensors, or slices of them, from the files in ``folder`` of all ranks that have written a checkpoint, each
    of which :func:`describe_parts` has given one of the ``indices``."""

    def __init__(self, folder: Path, indices: Sequence[Mapping[str, Any]] = ()) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parts: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
        """The parts of every tensor, by their files and what they are called there."""
        self.files: dict[str, Any] = {}
        for index in indices:
            self.add(index)

    def add(self, index: Mapping[str, Any]) -> None:
        """Take in what :func:`describe_parts` gave on one more rank; a ``ValueError``, ``TypeError``, ``LookupError``
        or ``AttributeError`` says that it is nothing of the kind."""
        for name, entry in index.items():
            shape = _counts(name, entry["shape"])
            if self.shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name} is of shape {shape} on one rank, {self.shapes[name]} on another")
            known = self.parts.setdefault(name, {})
            for part in entry["parts"]:
                offset, size = _counts(name, part["offset"]), _counts(name, part["size"])
                if not len(offset) == len(size) == len(shape):
                    raise ValueError(f"{name} of {len(shape)} dimensions has a part of {len(size)} at {len(offset)}")
                if any(start + length > most for start, length, most in zip(offset, size, shape, strict=True)):
                    raise ValueError(f"{name} of shape {shape} has a part of {size} at {offset}")
                place = part["file"], part.get("key", name)
                if not all(isinstance(text, str) for text in place):
                    raise ValueError(f"{name} has a part in the file {part['file']!r}")
                if place in known:
                    raise ValueError(f"{name} has two parts in {part['file']}")
                known[place] = part

    @torch.no_grad()
    def read_into(self, name: str, target: Part) -> None:
        """Fill the tensor of ``target``, a part of the tensor ``name``, in place; a ``RecipeError`` says that the
        checkpoint has another shape of it, or does not have all of it."""
        if self.shapes.get(name) != target.shape:
            found = f"of shape {self.shapes[name]}" if name in self.shapes else "not there"
            raise RecipeError(f"{self.folder}: {name} is {found}, and the model needs it of shape {target.shape}")
        filled = sum(self._copy(name, part, target) for part in self.parts[name].values())
        wanted = target.tensor.numel()
        if filled != wanted:
            raise RecipeError(f"{self.folder}: {name} is incomplete: {filled} of {wanted} numbers were found")

    def read(self, name: str) -> Tensor:
        """The whole tensor ``name``, in the type that it was saved in; no memory is taken for one of which the files
        hold less than its shape says."""
        stored = [self._stored(name, part) for part in self.parts[name].values()]
        there, wanted = sum(math.prod(part.get_shape()) for part in stored), math.prod(self.shapes[name])
        if there != wanted or not stored:
            raise CorruptCheckpoint(f"{self.folder}: {name} is incomplete: {there} of {wanted} numbers were found")
        tensor = torch.empty(self.shapes[name], dtype=NAMES[stored[0].get_dtype()])
        self.read_into(name, whole(tensor))
        return tensor

    def _copy(self, name: str, part: Mapping[str, Any], target: Part) -> int:
        """Copy what ``part`` and ``target`` have in common, and say how many numbers that is."""
        there, here, count = [], [], 1
        for a, n, b, m in zip(part["offset"], part["size"], target.offset, target.tensor.shape, strict=True):
            start, end = max(a, b), min(a + n, b + m)
            there.append(slice(start - a, end - a))
            here.append(slice(start - b, end - b))
            count *= max(0, end - start)
        if count:
            stored = self._stored(name, part)
            # A number is whole.
            found = stored[tuple(there)] if there else self._open(part["file"]).get_tensor(part.get("key", name))
            target.tensor[tuple(here)].copy_(found)
        return count

    def _stored(self, name: str, part: Mapping[str, Any]) -> Any:
        """A part in its file, not read yet, as it was described."""
        path = self.folder / part["file"]
        try:
            stored = self._open(part["file"]).get_slice(part.get("key", name))
        except SafetensorError as error:
            raise CorruptCheckpoint(f"{path} does not hold {name}: {error}") from error
        if stored.get_shape() != list(part["size"]):
            raise CorruptCheckpoint(f"{path} holds {name} of shape {stored.get_shape()}, not {list(part['size'])}")
        return stored

    def _open(self, name: str) -> Any:
        if name not in self.files:
            path = self.folder / name
            if path.parent != self.folder:
                raise CorruptCheckpoint(f"{self.folder}: the tensors must lie in its own files, not in {name!r}")
            try:
                self.files[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CorruptCheckpoint(f"{path} is corrupt or not a safetensors file: {error}") from error
        return self.files[name]


def _counts(name: str, values: Any) -> tuple[int, ...]:
    """Sizes or places along the dimensions of the tensor ``name``."""
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{name} has {values!r} where a list of sizes must be")
    return tuple(values)
