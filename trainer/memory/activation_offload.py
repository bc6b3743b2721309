"""``memory.activation_offload``: tensors that forward saves for backward wait in host memory.

Copies run on a separate stream, concurrently with the computation. Backward fetches each tensor one ahead of its use.
Torch's ``save_on_cpu`` does not overlap copies with computation, and offloads every tensor of any size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from trainer.memory.sharding import local_shard

MIN_OFFLOAD_BYTES = 2**20  # smaller tensors stay on the device: they save little memory for the time of a copy
IN_FLIGHT = 2  # max tensors being copied to the host; a third waits, so that the peak does not depend on timing


def offload_activations(module: nn.Module, device: torch.device) -> None:
    """Make forward of ``module`` offload what it saves for backward, except parameters; on a CPU without a benefit."""
    forward = module.forward
    sizes = {p.numel() for p in module.parameters()}

    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        offloader = ActivationOffloader(
            device, MIN_OFFLOAD_BYTES, lambda tensor: tensor.numel() in sizes and _is_parameter(tensor, module)
        )
        with saved_tensors_hooks(offloader.pack, offloader.unpack):
            return forward(*args, **kwargs)

    module.forward = offloading


def _is_parameter(tensor: Tensor, module: nn.Module) -> bool:
    """Return whether ``tensor`` is a weight or a view of one: FSDP frees those itself, others stay in any case."""
    pointer = tensor.untyped_storage().data_ptr()
    return any(local_shard(p).untyped_storage().data_ptr() == pointer for p in module.parameters())


class AutocastWeight(NamedTuple):
    """A weight that autocast has cast, or a view of it: backward casts the weight again instead of storing it."""

    weight: Tensor
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def detect(cls, tensor: Tensor) -> AutocastWeight | None:
        """Return ``tensor`` as a ``AutocastWeight`` if its autograd graph shows that it is one."""
        whole = tensor if tensor._base is None else tensor._base
        if whole.grad_fn is None or whole.grad_fn.name() != "ToCopyBackward0":
            return None
        weight = getattr(whole.grad_fn.next_functions[0][0], "variable", None)
        if weight is None or (weight.device, weight.stride()) != (whole.device, whole.stride()):
            return None
        return cls(weight, whole.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def recast(self) -> Tensor:
        """Repeat the cast, with the same bits: no code changes a weight between its forward and its backward."""
        return self.weight.detach().to(self.dtype).as_strided(self.shape, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class OffloadedTensor:
    """One tensor in host memory."""

    host: Tensor  # the copy, complete after the event ``arrived``
    index: int  # index in ``ActivationOffloader.items``
    refcount: int = 1  # number of operations that have saved it
    on_device: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    fetched: torch.cuda.Event | None = None


class ActivationOffloader:
    """The tensors of at least ``least_bytes`` that one forward on ``device`` saved, unless ``stays(tensor)``."""

    def __init__(self, device: torch.device, least_bytes: int, stays: Callable[[Tensor], bool]) -> None:
        self.device, self.least_bytes, self.keep_on_device = device, least_bytes, stays
        self.stream = _stream(device)
        self.items: list[OffloadedTensor] = []
        self.in_flight: deque[tuple[Tensor, OffloadedTensor]] = deque()

    def pack(self, tensor: Tensor) -> Tensor | OffloadedTensor | AutocastWeight:
        large = tensor.numel() * tensor.element_size() >= self.least_bytes
        if tensor.device.type != self.device.type or not large or _is_expanded(tensor) or self.keep_on_device(tensor):
            return tensor
        if (cast := AutocastWeight.detect(tensor)) is not None:
            return cast
        for other, saved in self.in_flight:  # queries, keys and values save the same input in turn
            if _identity(other) == _identity(tensor):
                saved.refcount += 1
                return saved
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.stream is not None)
        self.items.append(OffloadedTensor(host, len(self.items)))
        self._copy_to_host(tensor, self.items[-1])
        return self.items[-1]

    def unpack(self, packed: Tensor | OffloadedTensor | AutocastWeight) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, AutocastWeight):
            return packed.recast()
        self._release(0)
        tensor = self._prefetch(packed)
        if packed.fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(packed.fetched)
        packed.refcount -= 1
        if packed.refcount <= 0:
            packed.on_device = None
        before = self.items[packed.index - 1]
        if self.stream is not None and packed.index > 0 and before.refcount > 0:
            self._prefetch(before)  # probably the next one needed
        return tensor

    def __del__(self) -> None:
        # Tensors that were fetched but never used are freed now. Wait for their copies first, which would otherwise
        # write to memory that the computation reuses.
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _copy_to_host(self, tensor: Tensor, saved: OffloadedTensor) -> None:
        if self.stream is None:
            saved.host.copy_(tensor)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                # A tensor with gaps, such as a slice of packed queries, would be copied through pageable memory.
                dense = tensor if tensor.stride() == saved.host.stride() else tensor.clone()
                saved.host.copy_(dense, non_blocking=True)
                saved.arrived = self.stream.record_event()
        self.in_flight.append((tensor, saved))
        self._release(IN_FLIGHT)

    def _release(self, most: int) -> None:
        while len(self.in_flight) > most:
            _, saved = self.in_flight.popleft()
            if saved.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(saved.arrived)

    def _prefetch(self, saved: OffloadedTensor) -> Tensor:
        if saved.on_device is None and self.stream is None:
            saved.on_device = saved.host.clone()
        elif saved.on_device is None and self.stream is not None:
            saved.on_device = torch.empty_like(saved.host, device=self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                saved.on_device.copy_(saved.host, non_blocking=True)
                saved.fetched = self.stream.record_event()
        assert saved.on_device is not None
        return saved.on_device


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether elements share memory, as in an attention mask expanded over heads: a copy would be larger."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _identity(tensor: Tensor) -> tuple:
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None
