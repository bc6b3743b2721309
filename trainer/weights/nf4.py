"""NF4: frozen weights of linear layers in 4.14 bits each, dequantised only while in use (Dettmers et al. 2023).

Codes and scales follow the paper, stored in our own byte parameter. torchao 0.18's ``NF4Tensor`` needs a multiple of
16,384 weights on every rank and the mean over all scales of a weight, so a rank cannot quantise only its slices of a
file. bitsandbytes quantises whole weights, and keeps the scales in an attribute that FSDP2 does not shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from trainer.weights.fused import has_kernels

WEIGHTS_PER_SCALE, WEIGHTS_PER_ROW = 64, 4096
"""Weights per scale, and weights per row of codes. A row has 64 scales, each quantised to 8 bits within their range
(the paper's double quantisation uses groups of 256). Both are counted from the start of the whole weight."""

SCALES_PER_ROW = WEIGHTS_PER_ROW // WEIGHTS_PER_SCALE
BYTES_PER_ROW = WEIGHTS_PER_ROW // 2 + SCALES_PER_ROW + 8
"""Bytes of a row: two codes per byte, the scales, and in fp32 the smallest scale and the step between scales."""

CHUNK_ROWS = 1024  # rows processed at a time: some 25 MB in addition to the weight itself

NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Values of the 16 codes, relative to the scale, which is the largest absolute weight of a block: quantiles of the
normal distribution (appendix E of the paper)."""

NF4_THRESHOLDS = tuple((a + b) / 2 for a, b in zip(NF4_LEVELS, NF4_LEVELS[1:], strict=False))
BYTE_TO_LEVELS = tuple((NF4_LEVELS[byte >> 4], NF4_LEVELS[byte & 15]) for byte in range(256))

IN_ONE_KERNEL = (torch.float32, torch.float16, torch.bfloat16)
_pairs: dict[torch.device, Tensor] = {}


def num_code_rows(count: int) -> int:
    return -(-count // WEIGHTS_PER_ROW)


@torch.no_grad()
def quantise(weights: Tensor) -> Tensor:
    """Return the codes, uint8 ``(rows, BYTES_PER_ROW)``, of ``weights`` in order. Zeros pad the last row."""
    flat = weights.detach().reshape(-1)
    codes = torch.empty(num_code_rows(flat.numel()), BYTES_PER_ROW, dtype=torch.uint8, device=flat.device)
    for some, rows in zip(flat.split(CHUNK_ROWS * WEIGHTS_PER_ROW), codes.split(CHUNK_ROWS), strict=True):
        values = functional.pad(some.float(), (0, -some.numel() % WEIGHTS_PER_ROW))
        values = values.view(len(rows), SCALES_PER_ROW, WEIGHTS_PER_SCALE)
        largest = values.abs().amax(-1)
        least, most = largest.amin(1, keepdim=True), largest.amax(1, keepdim=True)
        step = (most - least) * (1 / 255)  # a product, because GPUs and CPUs divide by a constant differently
        scales = ((largest - least) / step.where(step > 0, 1.0)).round().clamp(max=255)
        parts = values / largest.where(largest > 0, 1.0).unsqueeze(-1)
        found = torch.zeros(parts.shape, dtype=torch.uint8, device=parts.device)
        for middle in NF4_THRESHOLDS:  # twice as fast as torch.bucketize
            found += parts > middle
        found = found.view(len(rows), -1, 2)
        pieces = [found[..., 0] << 4 | found[..., 1], scales.to(torch.uint8)]
        torch.cat([*pieces, torch.cat([least, step], 1).view(torch.uint8)], 1, out=rows)
    return codes


def iter_chunks(codes: Tensor, whole: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Pair ``codes`` with the weights that they encode, ``CHUNK_ROWS`` rows at a time. A plan traces two of these."""
    return zip(codes.split(CHUNK_ROWS), whole.split(CHUNK_ROWS * WEIGHTS_PER_ROW), strict=True)


@torch.no_grad()
def dequantise(codes: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the weight of ``shape`` encoded by ``codes``, computed in fp32 and rounded once to ``dtype``."""
    if dtype in IN_ONE_KERNEL and has_kernels(codes):
        from trainer.weights.nf4_kernel import nf4_weight  # imports Triton

        table = None if isinstance(codes, FakeTensor) else _pair_table_on(codes)
        return nf4_weight(codes.to(torch.uint8).contiguous(), table, WEIGHTS_PER_SCALE, shape, dtype)
    whole = torch.empty(len(codes) * WEIGHTS_PER_ROW, dtype=dtype, device=codes.device)
    for some, out in iter_chunks(codes, whole):
        # FSDP of torch 2.11 casts bytes to its compute dtype, which represents them exactly.
        packed, scales, numbers = some.to(torch.uint8).split([WEIGHTS_PER_ROW // 2, SCALES_PER_ROW, 8], 1)
        least, step = numbers.contiguous().view(torch.float32).split(1, 1)
        values = functional.embedding(packed.int(), _pair_table_on(codes))
        values = values.view(len(some), SCALES_PER_ROW, WEIGHTS_PER_SCALE)
        torch.mul(values, (least + step * scales).unsqueeze(-1), out=out.view_as(values))
    return whole[: math.prod(shape)].view(shape)


def _pair_table_on(codes: Tensor) -> Tensor:
    """Return the values of each byte on the device of ``codes``. They are copied once: each copy would be a sync."""
    found, real = _pairs.get(codes.device), type(codes) in (Tensor, nn.Parameter) and not codes.is_meta
    if found is None or not real:  # do not cache fake tensors
        found = torch.tensor(BYTE_TO_LEVELS, dtype=torch.float32, device=codes.device)
        if real:
            _pairs[codes.device] = found
    return found


class NF4Linear(nn.Module):
    """A linear layer with a frozen weight in NF4.

    It replaces an ``nn.Linear``, or transformers' ``Conv1D``, whose weight is transposed. Its only parameter except
    the bias is ``codes``, uint8 ``(rows, BYTES_PER_ROW)``, which FSDP2 shards by rows.

    Args:
        layer: the layer to replace, on any device. For a layer on meta the codes are on meta too.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        weight: Any = layer.weight
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        """Shape and dtype of the original weight."""
        self.transposed = not isinstance(layer, nn.Linear)
        self.out_features, self.in_features = self.shape[::-1] if self.transposed else self.shape
        empty = torch.empty(num_code_rows(weight.numel()), BYTES_PER_ROW, dtype=torch.uint8, device="meta")
        self.codes = nn.Parameter(empty if weight.is_meta else quantise(weight), requires_grad=False)
        self.bias: nn.Parameter | None = layer.bias  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:
        """The full weight, dequantised on each access. Some blocks read its dtype."""
        return dequantise(self.codes, self.shape, self.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map ``(..., in_features)`` to ``(..., out_features)``, in the dtype of the inputs or of autocast."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return _Linear.apply(inputs.to(dtype), self.codes, bias, self.shape, self.transposed)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class _Linear(torch.autograd.Function):
    """Dequantises again in backward, so that only the codes are kept between the two passes."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, codes: Tensor, bias: Tensor | None, shape: Any, transposed: bool) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.shape, ctx.transposed = shape, transposed
        weight = dequantise(codes, shape, inputs.dtype)  # freed after the product
        return functional.linear(inputs, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        inputs = bias = None
        if ctx.needs_input_grad[0]:
            weight = dequantise(codes, ctx.shape, gradient.dtype)
            inputs = gradient @ (weight.t() if ctx.transposed else weight)
        if ctx.needs_input_grad[2]:
            bias = gradient.sum(tuple(range(gradient.ndim - 1)))
        return inputs, None, bias, None, None


class WeightCounts(NamedTuple):
    """Number of weights of a module: all, those in NF4, and the trained ones."""

    parameters: int
    in_nf4: int
    trained: int

    def __str__(self) -> str:
        notes = [f"{self.in_nf4:,} in NF4"] if self.in_nf4 else []
        notes += [f"{self.trained:,} trained"] if self.trained < self.parameters else []
        return f"{self.parameters:,} parameters" + (f" ({', '.join(notes)})" if notes else "")


def count_weights(module: nn.Module) -> WeightCounts:
    """Count the weights of ``module``, including those encoded in quantised layers."""
    coded = {id(part.codes): math.prod(part.shape) for part in module.modules() if isinstance(part, NF4Linear)}
    sizes = [(coded.get(id(p), p.numel()), p.requires_grad) for p in module.parameters()]
    trained = sum(size for size, trains in sizes if trains)
    return WeightCounts(sum(size for size, _ in sizes), sum(coded.values()), trained)
