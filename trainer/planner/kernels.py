"""CUDA kernels that look at a tensor's device before they do anything, for tensors that C++ believes to be on meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from trainer.planner.attention import AttentionRules, attend
from trainer.planner.fake_mode import GPU_DEVICE

aten = torch.ops.aten


def install_kernels(library: torch.library.Library, attention: AttentionRules) -> None:
    """Register attention, dropout and moves between devices in ``library``, for aten."""
    library.impl("scaled_dot_product_attention", attend(attention), "AutogradCUDA")
    library.impl("dropout", dropout, "AutogradCUDA")
    for key in ("AutogradCUDA", "AutogradCPU"):
        library.impl("to.dtype_layout", to_dtype_layout, key)
        library.impl("to.device", to_device, key)


def dropout(tensor: Tensor, rate: float, train: bool) -> Tensor:
    """The fused kernel of CUDA, which keeps a mask of one byte an element."""
    if not train or rate == 0 or tensor.numel() == 0:
        return tensor
    if rate == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return aten.native_dropout(tensor, rate, train)[0]


def to_dtype_layout(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """As in C++, but for the device of ``tensor``, of which C++ has another idea."""
    dtype = dtype or tensor.dtype
    device = torch.device(device) if device is not None else tensor.device
    if device.type == "meta" and isinstance(tensor, FakeTensor):
        device = tensor.device  # C++ asks for "where it is"
    if device.type == "cuda":
        device = GPU_DEVICE
    unchanged = dtype == tensor.dtype and device == tensor.device
    if unchanged and not copy and memory_format in (None, torch.preserve_format):
        return tensor
    return aten._to_copy(tensor, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format)


def to_device(
    tensor: Tensor,
    device: Any,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    return to_dtype_layout(
        tensor, dtype=dtype, device=device, non_blocking=non_blocking, copy=copy, memory_format=memory_format
    )
