"""NF4 codes to a weight in one kernel: it reads 0.52 bytes a weight, and writes the weight.

The bits are those of :func:`trainer.weights.nf4.dequantise` on a CPU. Where Triton is missing, this module can be
imported all the same: plans for GPUs need the operator, and none of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton


def _triton() -> tuple[Any, Any, Any]:
    """How kernels and operators are registered, and Triton's language; without Triton, operators without kernels."""
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
    """``values`` in the type that ``out`` points to: to nearest even, by hand as Triton's interpreter truncates."""
    if out.dtype.element_ty == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        found = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        found = values.to(out.dtype.element_ty)
    return found


@jit
def _fp32(place):
    """The number in four bytes, at any address: where codes begin in a buffer of FSDP is not known."""
    bits = tl.load(place).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(place + byte).to(tl.uint32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@jit
def _weight(codes, table, out, count, ROW: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[name-defined]
    """The weights of one row of codes."""
    row = tl.program_id(0).to(tl.int64)
    base = codes + row * ROW
    scales = base + BLOCKS * (BLOCK // 2)
    blocks = tl.arange(0, BLOCKS)[:, None]
    packed = tl.load(base + blocks * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]).to(tl.int32)
    # With zero added, the product is rounded by itself. Else compilers may add the least scale before they round:
    # torch.compile of torch 2.11 drops the option that forbids it.
    above = tl.fma(tl.load(scales + blocks).to(tl.float32), _fp32(scales + BLOCKS + 4), 0.0)
    values = tl.interleave(tl.load(table + 2 * (packed >> 4) + 1), tl.load(table + 2 * (packed & 15) + 1))
    place = (row * BLOCKS + blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + place, rounded(values * (_fp32(scales + BLOCKS) + above), out), mask=place < count)


@operator("trainer::nf4_weight", mutates_args=())
def nf4_weight(codes: Tensor, table: Tensor | None, block: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight that contiguous ``codes`` are of, in fp32, fp16 or bf16. ``table`` has, in fp32, what the two codes of
    each byte stand for; codes without data need none. A scale is that of ``block`` weights."""
    (rows, size), out = codes.shape, _empty(codes, table, block, shape, dtype)
    blocks = (size - 8) // (block // 2 + 1)  # of a row: two codes or a scale a byte, and two fp32 numbers
    wrap_triton(_weight)[(rows,)](codes, table, out, out.numel(), size, blocks, block, **OPTIONS)
    return out


@nf4_weight.register_fake
def _empty(codes: Tensor, table: Any, block: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)
