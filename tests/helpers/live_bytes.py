"""Counts the bytes of tensors that are alive: the same figures on a CPU as the allocator would give on a GPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within it, ``peak`` is the most bytes that storages made since its start took at once.

    Mapped files are not counted (their pages are the system's to drop), nor is what other threads make. Of fake tensors
    it is what real ones would take.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, DTensor):
                leaf = leaf._local_tensor
            leaf = getattr(leaf, "elem", leaf)  # of one that a collective has not filled yet
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        # What torch has allocated is no file, and can be resized: to look takes longer than most operations.
        if storage.device.type != "meta" and not storage.resizable() and is_mapped(storage.data_ptr()):
            return
        self._alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def is_mapped(address: int) -> bool:
    """Whether ``address`` lies in the mapping of a weight file."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            if line.rstrip().endswith((".safetensors", ".pth")):
                start, end = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
                if start <= address < end:
                    return True
    return False


def weight_bytes(module: torch.nn.Module) -> int:
    """Of the parameters and buffers of ``module``, tied ones once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({t.untyped_storage()._cdata: t.nbytes for t in tensors}.values())
