"""Replacements for CUDA kernels that check a tensor's device, because C++ sees simulated tensors on meta."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.backends import cuda
from torch.nn import functional

from trainer.fakegpu.allocator import round_up
from trainer.fakegpu.mode import GPU_DEVICE, FakeGPUMode

aten = torch.ops.aten


def install_kernels(library: torch.library.Library, attention: AttentionRules) -> None:
    """Register aten's attention, dropout and device moves in ``library``."""
    for key in ("AutogradCUDA", "AutogradMeta"):  # C++ sees a DTensor on meta
        library.impl("scaled_dot_product_attention", attention.attend, key)
        library.impl("dropout", dropout, key)
    library.impl("_pad_packed_sequence", pad_packed_sequence, "AutogradCUDA")
    for key in ("AutogradCUDA", "AutogradCPU"):
        library.impl("to.dtype_layout", to_dtype_layout, key)
        library.impl("to.device", to_device, key)


def dropout(tensor: Tensor, rate: float, train: bool) -> Tensor:
    """Apply dropout like CUDA's fused kernel, which keeps a mask of one byte per element."""
    if not train or rate == 0 or tensor.numel() == 0:
        return tensor
    if rate == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    return aten.native_dropout(tensor, rate, train)[0]


def pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Do the same as the C++ function, which would write into memory that does not exist."""
    sizes = batch_sizes.tolist()
    padded = data.new_full((max(len(sizes), total_length), sizes[0], *data.shape[1:]), padding_value)
    for row, part in enumerate(data.split(sizes)):
        padded[row, : len(part)] = part
    lengths = torch.tensor([sum(size > item for size in sizes) for item in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


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
    """Do the same as the C++ function, with the device that Python sees for ``tensor``."""
    dtype = dtype or tensor.dtype
    device = torch.device(device) if device is not None else tensor.device
    if device.type == "meta" and isinstance(tensor, FakeTensor | FunctionalTensor):
        device = tensor.device  # C++ means the current device of the tensor
    if device.type == "cuda":
        device = GPU_DEVICE
    unchanged = dtype == tensor.dtype and device == tensor.device
    if unchanged and not copy and memory_format in (None, torch.preserve_format):
        return tensor
    return aten._to_copy(tensor, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format)


def to_device(tensor: Tensor, device: Any, dtype: torch.dtype, *options: Any) -> Tensor:
    named = dict(zip(("non_blocking", "copy", "memory_format"), options, strict=False))
    return to_dtype_layout(tensor, dtype=dtype, device=device, **named)


# Attention on the target GPU: choice of the kernel and its temporary memory.
# ``scaled_dot_product_attention`` would choose for a real GPU, so the choice is repeated here for the simulated one.
# Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and the host code of the kernels in that folder.

Kernel = Literal["flash", "efficient", "cudnn", "math"]
WITH_CUDNN = ((9, 0), (10, 0))  # compute capabilities for which torch prefers cuDNN's attention


@dataclass(frozen=True)
class AttentionRules:
    """The attention kernels that a GPU and a version of torch allow, and their temporary memory."""

    capability: tuple[int, int]  # CUDA compute capability
    prefers_cudnn: bool = False  # whether cuDNN has priority over flash (torch 2.10 and later)

    def choose(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> Kernel:
        """Choose among the enabled kernels; the tensors have the shape ``(batch, heads, tokens, size)``."""
        if query.dim() != 4 or 0 in query.shape[:3] or any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
            return "math"  # the other kernels need contiguous rows
        half = query.dtype in (torch.float16, torch.bfloat16)
        same_heads = query.size(1) == key.size(1) == value.size(1)
        sizes = query.size(-1), key.size(-1), value.size(-1)
        if cuda.cudnn_sdp_enabled() and half and self._cudnn(sizes[0], sizes[2], mask):
            return "cudnn"
        flash = cuda.flash_sdp_enabled() and half and mask is None and (same_heads or grouped)
        if flash and self.fits_flash(sizes, grouped):
            return "flash"
        efficient = cuda.mem_efficient_sdp_enabled() and same_heads and self._efficient(query.dtype, half, sizes)
        return "efficient" if efficient else "math"

    def _cudnn(self, size: int, value_size: int, mask: Tensor | None) -> bool:
        fits = size % 8 == value_size % 8 == 0 and max(size, value_size) <= 128
        learned = mask is not None and mask.requires_grad
        return self.prefers_cudnn and self.capability in WITH_CUDNN and fits and not learned

    def fits_flash(self, sizes: tuple[int, ...], grouped: bool) -> bool:
        """Return whether flash attention supports these sizes of query, key and value heads."""
        return len(set(sizes)) == 1 and sizes[0] <= 256 and self.capability >= (8, 0)

    def _efficient(self, dtype: torch.dtype, half: bool, sizes: tuple[int, ...]) -> bool:
        if self.capability < (5, 0) or not (half or dtype == torch.float32):
            return False
        if dtype == torch.bfloat16 and self.capability < (8, 0):
            return False
        align = 8 if half and self.capability >= (7, 0) else 4 if self.capability >= (8, 0) else 1
        return sizes[0] == sizes[1] and sizes[0] % align == sizes[2] % align == 0

    def flash(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
    ) -> Tensor:
        """Compute flash attention; head sizes are padded to a multiple of 8."""
        size = query.size(-1)
        scale = scale if scale is not None else size**-0.5
        if missing := -size % 8:
            query, key, value = (functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
        return out[..., :size] if missing else out

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute ``scaled_dot_product_attention`` with the kernel that is chosen for the GPU."""
        kernel = self.choose(query, key, value, attn_mask, enable_gqa)
        if isinstance(mode := getattr(query, "fake_mode", None), FakeGPUMode):
            mode.trace.note_attention(kernel, query, attn_mask is not None)
        if kernel == "flash":
            return self.flash(query, key, value, dropout_p, is_causal, scale)
        how: tuple[Any, ...] = (dropout_p, is_causal)
        if kernel == "math":
            math_kernel = aten._scaled_dot_product_attention_math
            return math_kernel(query, key, value, attn_mask, *how, None, scale=scale, enable_gqa=enable_gqa)[0]
        mask = None if attn_mask is None else _as_bias(attn_mask, query, key)
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        if kernel == "cudnn":
            cudnn = aten._scaled_dot_product_cudnn_attention
            return cudnn(query, key, value, mask, trains, *how, False, scale=scale)[0]
        return aten._scaled_dot_product_efficient_attention(query, key, value, mask, trains, *how, scale=scale)[0]

    def workspace_bytes(self, name: str, args: tuple) -> tuple[int, ...]:
        """Return the sizes in bytes of the temporary allocations of an attention kernel called with ``args``."""
        if not name.endswith("attention_backward"):
            return ()
        query = args[1]
        if name == "_flash_attention_backward":  # packed texts; see mha_varlen_bwd in flash_api.cpp
            (tokens, heads, size), texts = query.shape, len(args[6]) - 1
            rows = heads * (tokens + 128 * texts)
            expanded = 0 if args[2].shape[1] == heads else args[2].shape[0] * heads * size * query.element_size()
            return rows * round_up(size, 32) * 4, rows * 4, expanded, expanded
        batch, heads, tokens, size = query.shape
        rows = batch * heads
        if name == "_scaled_dot_product_efficient_attention_backward":
            scratch = 0 if query.dtype == torch.float32 else rows * round_up(tokens, 64) * round_up(size, 32) * 4
            return rows * round_up(tokens, 32) * 4, scratch
        if name in ("_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_cudnn_attention_backward"):
            return rows * round_up(tokens, 128) * round_up(size, 32) * 4, rows * round_up(tokens, 128) * 4
        return ()


MAX_UNSORTED = 3072  # number of ids up to which the backward of an embedding does not sort the ids
ROWS_PER_PART = 10  # ids of one row that one thread sums up (NROWS_PER_THREAD)


def embedding_bytes(grad: Tensor, ids: Tensor, rows: int, padding: int, by_frequency: bool) -> tuple[int, ...]:
    """Return the sizes of the temporary allocations of the backward of ``nn.Embedding``, which sorts many ids.

    The largest holds a row in fp32 for up to ten equal ids, so nearly as many rows as ids if they differ: 55 MB for
    16,384 ids of 32,768 rows of 768. Source: embedding_dense_backward_cuda in aten/src/ATen/native/cuda/Embedding.cu,
    embedding_backward_cuda_kernel in EmbeddingBackwardKernel.cu. For few rows, torch 2.11 and later may need less.
    """
    count = ids.numel()
    copied = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
    if count <= MAX_UNSORTED and not by_frequency:
        return (copied,)
    distinct = min(count, rows)
    parts, size = count // ROWS_PER_PART + distinct, ids.element_size()
    by_id = (size * count,) * (4 if by_frequency else 3)  # sorted ids, their order, starts of rows, frequencies
    summed = parts * grad.size(-1) * max(4, grad.element_size())
    return copied, *by_id, size * distinct, size * distinct, size * parts, summed


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Convert a mask to the kernels' form: added to the scores, rows with a stride multiple of 16, one per head."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
    length = mask.size(-1)
    if length % 16:
        mask = functional.pad(mask, (0, 16 - length % 16))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def counted_args(name: str, args: tuple) -> tuple:
    """Return arguments for torch's FLOP formula of attention: shapes, all with the queries' heads (torch 2.11 asks)."""
    if not name.startswith("_scaled_dot_product"):
        return args
    first = 1 if name.endswith("_backward") else 0  # backward starts with the gradient
    query, key, value = (tuple(tensor.shape) for tensor in args[first : first + 3])
    key, value = ((*shape[:1], query[1], *shape[2:]) for shape in (key, value))
    return (*args[:first], query, key, value, *args[first + 3 :])
