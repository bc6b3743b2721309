"""BigBird's block-sparse attention: the pattern, a kernel for any device, FlexAttention on GPUs, and the modules.

The pattern (Zaheer et al. 2020, "Big Bird") equals that of transformers' ``modeling_big_bird.py`` exactly, including
the blocks that its seeds draw in training. In evaluation every drawn block is the first one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.flop_counter import register_flop_formula
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.big_bird.modeling_big_bird import BigBirdModel, BigBirdSelfAttention

from trainer.errors import require
from trainer.fakegpu.events import INNER_BYTES

BLOCKS_AT_ONCE = 16  # blocks of queries at once: their keys, values and scores stay in a core's cache
MASK_VALUE = -1e30  # added to the score of a masked key; finite, so that a text of only padding gives no NaN
LONG_SEQUENCE_LENGTHS = (1024, 3072, 4096)  # tokens; their random blocks are drawn as in the paper's experiments
NAME = "block_sparse_attention"


@lru_cache(maxsize=64)
def attention_counts(
    layers: int, heads: int, blocks: int, num_random_blocks: int, size: int, longest: int, training: bool
) -> Any:
    """Count how often each query block attends to each key block: uint8 (layers, heads, blocks, blocks).

    The first and the last block attend to all blocks and are attended to by all. Every other block attends to itself,
    its neighbours and ``num_random_blocks`` random blocks, which count twice if they are also neighbours. ``size`` is
    the number of tokens per block, ``longest`` the maximum number of tokens of a text.
    """
    at = np.arange(blocks)
    counts = np.zeros((layers, heads, blocks, blocks), np.uint8)
    counts[..., abs(at[:, None] - at) <= 1] = 1
    counts[..., [0, -1]] = counts[..., [0, -1], :] = 1
    if not training:
        counts[..., 1:-1, 0] += num_random_blocks
        return counts
    for layer in range(layers):
        for head, row, chosen in _random_blocks(layer, heads, blocks, num_random_blocks, size, longest):
            counts[layer, head, row, chosen] += 1
    return counts


def _random_blocks(
    layer: int, heads: int, blocks: int, drawn: int, size: int, longest: int
) -> Iterator[tuple[int, int, Any]]:
    """Yield head, query block, and the key blocks drawn for it, in the order in which transformers draws."""
    permuted = np.random.RandomState(layer).permutation  # as after np.random.seed(layer), whose state is global
    if blocks * size in LONG_SEQUENCE_LENGTHS:
        last = 1024 // size - 1 if 2 * size < 1024 else longest // size - 1
        middle = np.arange(1, longest // size - 1)
        for head in range(heads):
            for row in range(1, longest // size - 1):
                window = slice(max(row - 2, 0), row + 1)
                chosen = permuted(middle[:last] if row >= longest // size - 3 else np.delete(middle[:last], window))
                if row < blocks - 1:
                    require(len(chosen) >= drawn, f"model.config: {drawn} random blocks of {size} tokens are too many")
                    yield head, row, chosen[:drawn]
        return
    end = 2 * drawn + 5
    for row in range(1, blocks):
        special = {1: end - 2, end - 2: 1}.get(row, 0)
        for head in range(heads):
            order = permuted(np.arange(end))
            if row < blocks - 1:
                yield head, row, order[~np.isin(order, (row - 1, row, row + 1, 0, end - 1, special))][:drawn]


# The kernel: a few query blocks at a time, with the keys and values that they attend to gathered next to each other.


@torch.library.custom_op(f"trainer::{NAME}", mutates_args=())
def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, counts: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Compute attention of query blocks to the key blocks in ``counts``, some of which count several times.

    Args:
        query, key, value: shape (batch, heads, tokens, size); the number of tokens is a multiple of the blocks.
        mask: (batch, tokens), true for tokens, false for padding. The output for a padding query is undefined.
        counts: uint8 (heads, blocks, blocks), from :func:`attention_counts`.
        width: maximum number of key blocks per query block, except the first and the last.

    Returns:
        The context, of the shape of ``query``, and the log-sum-exp of the scores, (batch, heads, tokens). Backward
        recomputes the weights from it, so no (tokens, tokens) tensor is kept.
    """
    out, sums = _fake(query, key, value, mask, counts, width)
    for b, h in product(*map(range, query.shape[:2])):
        queries, outs, logs = (_blocks(t[b, h], counts) for t in (query, out, sums))
        keys, values = (_blocks(t[b, h].contiguous(), counts) for t in (key, value))  # faster to gather from
        for rows, index, bias in _parts(mask[b], counts[h], width, sums.dtype):
            scores = _scores(queries[rows], _gathered(keys, index), bias)
            most = scores.amax(-1, keepdim=True)
            total = scores.sub_(most).exp_().sum(-1, keepdim=True)
            outs[rows] = scores.div_(total).to(value.dtype) @ _gathered(values, index)
            logs[rows] = total.log_().add_(most).squeeze(-1)
            del scores  # before the next scores are allocated
    return out, sums


@torch.library.custom_op(f"trainer::{NAME}_backward", mutates_args=())
def block_sparse_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    counts: Tensor,
    width: int,
    out: Tensor,
    sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of ``query``, ``key`` and ``value`` (Dao et al. 2022, "FlashAttention", algorithm 4)."""
    grads = _fake_backward(grad, query)
    scale = query.shape[-1] ** -0.5
    for b, h in product(*map(range, query.shape[:2])):
        queries, outs, logs = (_blocks(t[b, h], counts) for t in (query, out, sums))
        keys, values = (_blocks(t[b, h].contiguous(), counts) for t in (key, value))  # faster to gather from
        ups, of_queries, of_keys, of_values = (_blocks(t[b, h], counts) for t in (grad, *grads))
        key_sum, value_sum = torch.zeros_like(keys, dtype=sums.dtype), torch.zeros_like(keys, dtype=sums.dtype)
        for rows, index, bias in _parts(mask[b], counts[h], width, sums.dtype):
            near, up = _gathered(keys, index), ups[rows]
            weights = _scores(queries[rows], near, bias).sub_(logs[rows].unsqueeze(-1)).exp_()
            delta = (up * outs[rows]).sum(-1, keepdim=True, dtype=sums.dtype)
            change = (up @ _gathered(values, index).mT).to(sums.dtype).sub_(delta).mul_(weights).mul_(scale)
            change, weights = change.to(up.dtype), weights.to(up.dtype)
            of_queries[rows] = change @ near
            for total, part in ((key_sum, change.mT @ queries[rows]), (value_sum, weights.mT @ up)):
                total.index_add_(0, index.flatten(), part.to(total.dtype).view(-1, *total.shape[1:]))
            del near, weights, change, total, part
        of_keys.copy_(key_sum)
        of_values.copy_(value_sum)
    return grads


def _parts(mask: Tensor, counts: Tensor, width: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield groups of query blocks of one head, the key blocks of each, and the bias on their scores."""
    blocks = len(counts)
    padding = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, MASK_VALUE).view(blocks, -1)
    weight = counts.to(dtype).log_().clamp_(min=MASK_VALUE)
    top = counts[1:-1].int().topk(width).indices
    chosen = [(slice(0, None, blocks - 1), torch.arange(blocks, device=mask.device).expand(2, -1))]
    chosen += [
        (slice(at + 1, min(at + BLOCKS_AT_ONCE, blocks - 2) + 1), top[at : at + BLOCKS_AT_ONCE])
        for at in range(0, blocks - 2, BLOCKS_AT_ONCE)
    ]
    for rows, index in chosen:
        yield rows, index, (weight[rows].gather(1, index).unsqueeze(-1) + padding[index]).view(len(index), 1, -1)


def _scores(queries: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    return (queries @ keys.mT).to(bias.dtype).mul_(queries.shape[-1] ** -0.5).add_(bias)


def _blocks(tensor: Tensor, counts: Tensor) -> Tensor:
    return tensor.unflatten(0, (counts.shape[-1], -1))


def _gathered(blocks: Tensor, index: Tensor) -> Tensor:
    return blocks.index_select(0, index.flatten()).view(len(index), -1, blocks.shape[-1])


@block_sparse_attention.register_fake
def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, counts: Tensor, width: int) -> tuple[Tensor, Tensor]:
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    return _like(query), query.new_empty(query.shape[:3], dtype=exact)


@block_sparse_attention_backward.register_fake
def _fake_backward(grad: Tensor, query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(query), _like(query), _like(query)


def _like(query: Tensor) -> Tensor:
    """Allocate a tensor shaped like ``query`` with the heads of a token contiguous, the layout of linear layers."""
    batch, heads, tokens, size = query.shape
    return query.new_empty(batch, tokens, heads, size).transpose(1, 2)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.width = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *inputs, out, sums = ctx.saved_tensors
    with torch.autocast(grad.device.type, enabled=False):  # backward may be called under autocast
        return *block_sparse_attention_backward(grad, *inputs, ctx.width, out, sums), None, None, None


block_sparse_attention.register_autograd(_backward, setup_context=_setup_context)
_rules = torch.library.Library("trainer", "FRAGMENT")


def _in_lower_precision(op: Any, kind: str) -> Any:
    """Return the autocast rule of torch's own attention; ``register_autocast`` supports one dtype only."""

    def rule(*args: Any) -> Any:
        lower = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return op(*(arg.to(lower) if getattr(arg, "dtype", None) == torch.float32 else arg for arg in args))

    return rule


for _kind in ("cpu", "cuda"):
    _rules.impl(NAME, _in_lower_precision(block_sparse_attention, _kind), f"Autocast{_kind.upper()}")


@register_flop_formula(torch.ops.trainer.block_sparse_attention)
def _flops(query: Any, key: Any, value: Any, mask: Any, counts: Any, width: int, *_: Any, **options: Any) -> int:
    """Count the FLOPs of the products of queries with keys or values. The arguments are shapes, not tensors."""
    batch, heads, tokens, size = query
    block = tokens // counts[-1]
    attended = 2 * block * tokens + (tokens - 2 * block) * width * block
    return 2 * options.get("products", 2) * batch * heads * size * attended


@register_flop_formula(torch.ops.trainer.block_sparse_attention_backward)
def _flops_backward(grad: Any, *args: Any, **_: Any) -> int:
    return _flops(*args, products=5)


def workspace_bytes(op: Any, args: tuple[Any, ...], capability: tuple[int, int] | None) -> tuple[int, ...]:
    """Return the peak bytes of temporaries of ``op`` for ``args``; FlexAttention may replace it on a ``capability``."""
    backward = op is torch.ops.trainer.block_sparse_attention_backward.default
    query, _, _, _, counts, width = args[backward : 6 + backward]
    batch, heads, tokens, size = query.shape
    exact = max(query.element_size(), 4)
    if _has_flex(query, capability):
        return (batch * heads * tokens * exact,) if backward else ()
    blocks, block = counts.shape[-1], tokens // counts.shape[-1]
    rows, each = max(2, min(BLOCKS_AT_ONCE, blocks - 2)), query.element_size()
    # The keys of one part, for all its query blocks.
    near = max(2 * blocks, min(BLOCKS_AT_ONCE, blocks - 2) * width) * block
    gathered, scores, is_half = near * size * each, near * block * exact, exact > each
    in_half = near * block * each * is_half
    of_head = 2 * tokens * size * each * (heads > 1)  # contiguous copies of the head's keys and values
    if not backward:
        return of_head, gathered, scores, in_half, rows * block * size * each
    rounding = scores, scores, in_half, in_half
    adding = in_half or scores, in_half or scores, gathered, gathered, near * size * exact * is_half
    return of_head, 2 * tokens * size * exact, gathered, *max(rounding, adding, key=sum)


INNER_BYTES[torch.ops.trainer.block_sparse_attention.default] = workspace_bytes
INNER_BYTES[torch.ops.trainer.block_sparse_attention_backward.default] = workspace_bytes


# FlexAttention, on GPUs.


def block_sparse_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, counts: Tensor, width: int) -> Tensor:
    """Return the context of :func:`block_sparse_attention` from the fastest kernel for these tensors."""
    real = query.is_cuda and type(query) is Tensor  # the planner's tensors are fake
    if (
        real
        and _has_flex(query, torch.cuda.get_device_capability(query.device))
        and flex_works(query.device, query.dtype, query.shape[-1], query.shape[2] // counts.shape[-1])
    ):
        score_mod, block_mask = flex_pattern(mask, counts, query.shape[2])
        return _flex_attention()(query, key, value, score_mod=score_mod, block_mask=block_mask)
    return torch.ops.trainer.block_sparse_attention(query, key, value, mask, counts, width)[0]


def _has_flex(query: Tensor, capability: tuple[int, int] | None) -> bool:
    return capability is not None and capability >= (8, 0) and query.dtype != torch.float64


@cache
def flex_works(device: torch.device, dtype: torch.dtype, size: int, block: int) -> bool:
    """Return whether FlexAttention runs for heads of ``size``, forward and backward; warn if not.

    Backward needs more shared memory than some GPUs have (pytorch/pytorch issues 133254, 180278 and 198224). The amount
    depends on dtype, head size and tile, so a sequence of two tiles is tried, once.
    """
    tokens = 2 * _tile(block)
    counts = torch.ones(1, tokens // block, tokens // block, dtype=torch.int64, device=device)
    score_mod, block_mask = flex_pattern(torch.ones(1, tokens, dtype=torch.bool, device=device), counts, tokens)
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            heads = torch.zeros(1, 1, tokens, size, dtype=dtype, device=device, requires_grad=True)
            _flex_attention()(heads, heads, heads, score_mod=score_mod, block_mask=block_mask).sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler and Triton raise many different classes
        cause = " ".join(str(error).split())[:200]
        warnings.warn(f"FlexAttention does not run on {device} ({cause}): a slower kernel is used", stacklevel=2)
        return False
    return True


def flex_pattern(mask: Tensor, counts: Tensor, tokens: int) -> tuple[Any, Any]:
    """Return FlexAttention's ``score_mod`` and ``block_mask`` for ``mask`` and ``counts``."""
    from torch.nn.attention.flex_attention import BlockMask

    size, tile = tokens // counts.shape[-1], _tile(tokens // counts.shape[-1])
    again = counts.float().clamp_(min=1).log_()  # a block that counts twice has twice the weight

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + again[h, q // size, k // size]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[b, k] & (counts[h, q // size, k // size] > 0)

    missing, merged = -counts.shape[-1] % (tile // size), tile // size
    tiles = pad(counts, (0, missing, 0, missing)).unflatten(2, (-1, merged)).unflatten(1, (-1, merged)).amax((2, 4)) > 0
    order = tiles.byte().argsort(dim=-1, descending=True, stable=True).int()
    number, lengths = tiles.sum(-1, dtype=torch.int32), (tokens, tokens)
    made = BlockMask.from_kv_blocks(number[None], order[None], BLOCK_SIZE=tile, mask_mod=mask_mod, seq_lengths=lengths)
    return score_mod, made


def _tile(size: int) -> int:
    """Return the tokens per tile of the block mask: one block, or a multiple of 128 for older torch such as 2.11."""
    new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    return size if size % 128 == 0 or (new and size >= 16 and size.bit_count() == 1) else math.lcm(size, 128)


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


class SelfAttention(BigBirdSelfAttention):
    """The self-attention of an encoder layer: block-sparse if given ``counts``, otherwise full; both are fused."""

    def forward(  # type: ignore[override]
        self, hidden_states: Any, attention_mask: Any = None, counts: Any = None, width: int = 0, **_: Any
    ) -> Any:
        heads = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projections = (self.query, self.key, self.value)
        query, key, value = (linear(hidden_states).view(heads).transpose(1, 2) for linear in projections)
        if counts is not None:  # the model's definition has no dropout here
            context = block_sparse_forward(query, key, value, attention_mask, counts[self.layer_idx], width)
        else:
            dropout = self.dropout.p if self.training else 0.0
            context = scaled_dot_product_attention(query, key, value, attention_mask, dropout)
        return context.transpose(1, 2).flatten(2), None


class Encoder(BigBirdModel):
    """``BigBirdModel`` without the pooler, which never switches permanently to full attention.

    ``config.attention_type`` applies to batches long enough for the pattern. A short batch does not affect later ones.
    """

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **inputs: Any) -> Any:
        packed: dict[str, Any] = {name: inputs[name] for name in ("cu_seq_lens", "lengths") if name in inputs}
        if packed and inputs.get("token_type_ids") is None:  # the embeddings' default covers one text only
            inputs["token_type_ids"] = torch.zeros_like(input_ids)
        names = ("token_type_ids", "position_ids", "inputs_embeds")
        states = self.embeddings(input_ids=input_ids, **{name: inputs.get(name) for name in names})
        batch, tokens, _ = states.shape
        config: Any = self.config
        drawn, size = config.num_random_blocks, config.block_size
        if attention_mask is not None:
            attention_mask = attention_mask.bool()
        how: dict[str, Any] = packed
        if not packed and (config.attention_type == "original_full" or tokens <= (5 + 2 * drawn) * size):
            how = {"attention_mask": None if attention_mask is None else attention_mask[:, None, None]}
        elif not packed:
            mask = states.new_ones(batch, tokens, dtype=torch.bool) if attention_mask is None else attention_mask
            states, mask = pad(states, (0, 0, 0, -tokens % size)), pad(mask, (0, -tokens % size))
            sizes = (config.num_hidden_layers, config.num_attention_heads, states.shape[1] // size, drawn, size)
            counts = torch.from_numpy(attention_counts(*sizes, config.max_position_embeddings, self.training))
            if states.is_cuda:  # without a GPU sync
                counts = counts.pin_memory().to(states.device, non_blocking=True)
            how = {"attention_mask": mask, "counts": counts, "width": 5 + (drawn if self.training else 0)}
        out = self.encoder(states, **how).last_hidden_state[:, :tokens]
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=out)


def replace_attention(module: Any) -> None:
    """Replace the attention of a ``BigBirdModel`` classifier by swapping ``__class__``: parameters and names stay."""
    for part in module.modules():
        if type(part) in (BigBirdModel, BigBirdSelfAttention):
            part.__class__ = Encoder if isinstance(part, BigBirdModel) else SelfAttention
