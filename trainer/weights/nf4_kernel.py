"""Dequantisation of NF4 in one kernel, which reads 0.52 bytes per weight and writes the weight.

The result equals :func:`trainer.weights.nf4.dequantise` on a CPU bit for bit. This module can be imported without
Triton, because plans for GPUs need the operator, but not its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton


def _triton() -> tuple[Any, Any, Any]:
    """Return the decorators of kernels and operators, and Triton's language. Without Triton there are no kernels."""
    try:
        import triton.language
    except ImportError:
        return (lambda function: function), custom_op, None
    return triton.jit, triton_op, triton.language


jit, operator, tl = _triton()
OPTIONS = {"enable_fp_fusion": False}  # Triton 3.10's default; 3.9 warns if it is not given


@jit
def nothing():
    pass


@jit
def rounded(values, out):
    """Round ``values`` to the dtype of ``out``, to nearest even; by hand, because Triton's interpreter truncates."""
    if out.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        found = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        found = values.to(out.dtype.element_ty)
    return found


@jit
def _fp32(place):
    """Load an fp32 number from an unaligned address, because codes may start anywhere in a buffer of FSDP."""
    bits = tl.load(place).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(place + byte).to(tl.uint32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@jit
def _weight(codes, table, out, count, ROW: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[name-defined]
    row = tl.program_id(0).to(tl.int64)
    base = codes + row * ROW
    scales = base + BLOCKS * (BLOCK // 2)
    blocks = tl.arange(0, BLOCKS)[:, None]
    packed = tl.load(base + blocks * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]).to(tl.int32)
    # Adding zero makes the compiler round the product separately. Otherwise it may add the smallest scale before
    # rounding: torch.compile of torch 2.11 drops the option that forbids this.
    above = tl.fma(tl.load(scales + blocks).to(tl.float32), _fp32(scales + BLOCKS + 4), 0.0)
    values = tl.interleave(tl.load(table + 2 * (packed >> 4) + 1), tl.load(table + 2 * (packed & 15) + 1))
    place = (row * BLOCKS + blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + place, rounded(values * (_fp32(scales + BLOCKS) + above), out), mask=place < count)


@operator("trainer::nf4_weight", mutates_args=())
def nf4_weight(codes: Tensor, table: Tensor | None, block: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the weight encoded by contiguous ``codes``, in fp32, fp16 or bf16.

    ``table`` holds the two values of each byte, in fp32; fake codes need none. ``block`` weights share a scale.
    """
    (rows, size), out = codes.shape, _empty(codes, table, block, shape, dtype)
    blocks = (size - 8) // (block // 2 + 1)  # per row; it ends with two fp32 numbers
    wrap_triton(_weight)[(rows,)](codes, table, out, out.numel(), size, blocks, block, **OPTIONS)
    return out


@nf4_weight.register_fake
def _empty(codes: Tensor, table: Any, block: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)
