"""A hash of content: of numbers, texts, tensors and nests of them, the same in every process and on every machine."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEEPEST = 16
"""How deep a nest may be: a sample that refers to itself must not be followed for ever."""


class Content:
    """A sha256 that is fed with values. Kind, size and order of values count, the order of a mapping's keys does not.

    Args:
        values: what to begin with.
    """

    def __init__(self, *values: Any) -> None:
        self._hash = hashlib.sha256()
        for value in values:
            self.add(value)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any, depth: int = 0) -> None:
        """Feed ``value``. Of an object of another kind than the usual ones, the type's name and attributes count."""
        if value is None or isinstance(value, bool):
            self._put("constant", repr(value).encode())
        elif isinstance(value, int):
            self._put("int", str(value).encode())
        elif isinstance(value, float):
            self._put("float", struct.pack("<d", value))
        elif isinstance(value, str):
            self._put("text", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, bytes | bytearray | memoryview):
            self._put("bytes", value)
        elif isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(np.asarray(value), depth)
        elif depth > DEEPEST:
            self._put("deep", type(value).__qualname__.encode())
        else:
            self._add_nest(value, depth + 1)

    def _put(self, kind: str, content: Any) -> None:
        view = memoryview(content).cast("B")
        self._hash.update(f"{kind} {len(view)}:".encode())
        self._hash.update(view)

    def _add_tensor(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        self._put("tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        self._put("bytes", tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b"")

    def _add_array(self, array: np.ndarray, depth: int) -> None:
        if array.dtype.hasobject:
            self._add_nest(array.tolist() if array.ndim else [array.item()], depth + 1)
            return
        if sys.byteorder == "big" or array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        self._put("array", f"{array.dtype.str} {array.shape}".encode())
        self._put("bytes", np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.size else b"")

    def _add_nest(self, value: Any, depth: int) -> None:
        if isinstance(value, Mapping):
            parts = sorted((_digest(key, depth), _digest(item, depth)) for key, item in value.items())
            self._put("mapping", b"".join(key + item for key, item in parts))
        elif isinstance(value, Set):
            self._put("set", b"".join(sorted(_digest(item, depth) for item in value)))
        elif isinstance(value, Sequence):
            self._put("sequence", str(len(value)).encode())
            for item in value:
                self.add(item, depth)
        elif hasattr(value, "tobytes") and hasattr(value, "mode"):  # an image of PIL
            self._put("image", f"{value.mode} {value.size}".encode())
            self._put("bytes", value.tobytes())
        else:
            self._put("object", type(value).__qualname__.encode())
            self.add(_attributes(value), depth)


def _digest(value: Any, depth: int) -> bytes:
    content = Content()
    content.add(value, depth)
    return content._hash.digest()


def _attributes(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return getattr(value, "__dict__", None)
