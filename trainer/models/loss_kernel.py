"""The chunked loss on NVIDIA GPUs: one kernel from a head's products to losses, and one for their gradient.

Products keep their dtype, everything else is fp32. Forward reads them once (online softmax, Milakov & Gimelshein
2018). Backward overwrites them with the gradient (like Liger Kernel, Hsu et al. 2024). Results differ from the
reference, :mod:`trainer.models.chunked_loss`, by fp32 rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import wrap_triton

from trainer.weights.nf4_kernel import OPTIONS, jit, operator, rounded, tl

BLOCK = 4096  # words of a row processed at a time
LAUNCH = OPTIONS | {"num_warps": 8}


@jit
def _logits(products, scale, cap):
    logits = products.to(tl.float32) * scale
    if cap is not None:
        logits = cap - 2 * cap / (1 + tl.exp(2 * logits / cap))  # cap tanh(logits / cap)
    return logits


@jit
def _losses(products, targets, sums, losses, scale, cap, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the loss of one token: each lane holds its largest logit and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    products += row * WORDS
    largest, total = tl.full([BLOCK], -3e38, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, WORDS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logits = _logits(tl.load(products + at, mask=at < WORDS, other=0.0), scale, cap)
        logits = tl.where(at < WORDS, logits, float("-inf"))
        more = tl.maximum(largest, logits)
        total = total * tl.exp(largest - more) + tl.exp(logits - more)
        largest = more
    most = tl.max(largest, 0)
    log_sum = most + tl.log(tl.sum(total * tl.exp(largest - most), 0))
    tl.store(sums + row, log_sum)
    tl.store(losses + row, log_sum - _logits(tl.load(products + tl.load(targets + row)), scale, cap))


@jit
def _errors(products, sums, targets, gradient, start, words, scale, cap, BLOCK: tl.constexpr):
    """Compute the gradient of a range of products of one token, starting at word ``start``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = products + row * words + at
    logits = _logits(tl.load(places, mask=at < words, other=0.0), scale, cap)
    errors = tl.exp(logits - tl.load(sums + row))
    errors = (errors - (at == tl.load(targets + row) - start).to(tl.float32)) * tl.load(gradient + row)
    if cap is not None:
        errors *= 1 - (logits / cap) * (logits / cap)
    tl.store(places, rounded(errors * scale, products), mask=at < words)


@operator("trainer::token_losses", mutates_args=())
def token_losses(products: Tensor, targets: Tensor, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """Return log-sum-exps and losses, fp32 ``(tokens, 1)``, of contiguous ``products`` in fp32, fp16 or bf16."""
    sums, losses = _empty(products)
    tokens, words = products.shape
    wrap_triton(_losses)[(tokens,)](products, targets, sums, losses, scale, cap, words, BLOCK, **LAUNCH)
    return sums, losses


@token_losses.register_fake
def _empty(products: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    sums = products.new_empty(len(products), 1, dtype=torch.float32)
    return sums, torch.empty_like(sums)


@operator("trainer::token_errors_", mutates_args={"products"})
def token_errors_(
    products: Tensor, sums: Tensor, targets: Tensor, gradient: Tensor, start: int, scale: float, cap: float | None
) -> None:
    """Overwrite ``products`` of words from ``start`` on with their gradient, given that of each loss, fp32."""
    (tokens, words), given = products.shape, (products, sums, targets, gradient, start)
    wrap_triton(_errors)[(tokens, -(-words // BLOCK))](*given, words, scale, cap, BLOCK, **LAUNCH)


token_errors_.register_fake(lambda *_: None)
