"""Encoders of transformers computed on the tokens that are there: the texts of a micro-batch lie one after another.

Linear layers, norms and activation functions see one row of tokens, attention sees each text by itself. The last block
computes queries, projections and its feed-forward network for the first token of each text only, which is all that a
classifier's head reads. So nothing is spent on padding, and the result is that of the padded micro-batch. The idea is
that of "padding-free" or "unpadded" training (MosaicBERT, Portes et al. 2023; ModernBERT, Warner et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout as drop_out
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function_unary
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.big_bird.modeling_big_bird import BigBirdLayer
from transformers.models.distilbert.modeling_distilbert import TransformerBlock
from transformers.models.modernbert.modeling_modernbert import ModernBertEncoderLayer
from transformers.models.roberta.modeling_roberta import RobertaLayer
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaLayer

BITS = 16  # random bits that decide whether a CPU drops an attention weight: the rate is rounded to 2^-16
MAX_PADDING = 4  # rows for each token, up to which texts are padded for one call of attention on a GPU
ROWS = 256  # queries processed at once by attention with dropout on a CPU: a long text's weights fit into no cache


class Lengths:
    """The tokens of each text, in a wrapper: of a list, the compiler would compile again for every number of texts."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.longest = tokens, max(tokens)
        self._padding: tuple[Tensor, Tensor] | None = None

    def padding(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Where each token is among texts padded to the longest, and a mask of the keys there; computed once.

        Returns int64 ``(tokens,)``, and bool ``(texts, 1, 1, longest)``.
        """
        if self._padding is None:
            begins, counts, texts = ends[:-1].long(), ends.diff(), len(self.tokens)
            moves = torch.arange(texts, device=ends.device) * self.longest - begins
            total = sum(self.tokens)  # known here: torch need not wait for the GPU to know it
            moved = moves.repeat_interleave(counts, output_size=total)
            seen = torch.arange(self.longest, device=ends.device) < counts[:, None]
            self._padding = torch.arange(total, device=ends.device) + moved, seen[:, None, None]
        return self._padding


class Pattern(NamedTuple):
    """What a token of a text attends to, and how scores become weights."""

    causal: bool = False  # only itself and what is before it
    window: int | None = None  # no token as far away as this, or further
    scale: float | None = None  # of the scores; None for 1 / sqrt(size of a head)
    softcap: float | None = None  # of scores: softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # (heads,): scores of a key that has no value

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        """Which keys a query sees, bool (length, length), of one text alone; ``None`` for all of them."""
        if not self.causal and (self.window is None or self.window >= length):
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        seen = seen.tril() if self.causal else seen
        if self.window is None:
            return seen
        seen = seen.triu(1 - self.window)
        return seen if self.causal else seen.tril(self.window - 1)


FULL = Pattern()


def pack(batch: Mapping[str, Any], padding_idx: int | None) -> dict[str, Any] | None:
    """The micro-batch without its padding; ``None`` where it is of another form, or a text begins in another column.

    Args:
        batch: on the host: ``attention_mask`` ``(n, length)``, others of that shape, and ``labels``, which stay.
        padding_idx: of models whose positions begin behind that of the padding token, and leave such tokens out.

    Returns:
        The others, ``(1, tokens)``; ``position_ids``, alike; ``lengths``, a :class:`Lengths`; and
        ``cu_seq_lens``, where each text begins and the last one ends, int32 ``(n + 1,)``.
    """
    mask = batch["attention_mask"].bool()
    others = {key: value for key, value in batch.items() if key not in ("attention_mask", "labels")}
    if mask.ndim != 2 or any(getattr(value, "shape", ())[:2] != mask.shape for value in others.values()):
        return None
    tokens = mask.sum(1)
    columns = torch.arange(mask.shape[1])
    if not (mask == (columns < tokens[:, None])).all() or not tokens.all():
        return None
    packed = {key: value[mask][None] for key, value in others.items()}
    positions = columns.expand_as(mask)
    if padding_idx is not None:  # as RobertaEmbeddings has them: a text may hold the padding token
        counted = (batch["input_ids"] != padding_idx).long()
        positions = counted.cumsum(1) * counted + padding_idx
    packed.setdefault("position_ids", positions[mask][None])
    ends = torch.nn.functional.pad(tokens.cumsum(0), (1, 0)).to(torch.int32)
    rest = {"labels": batch["labels"]} if "labels" in batch else {}
    return {**packed, "cu_seq_lens": ends, "lengths": Lengths(tokens.tolist()), **rest}


def unpad(module: nn.Module) -> None:
    """Let the blocks of ``module`` take packed micro-batches, too; only their class changes, no parameter or name."""
    blocks = [part for part in module.modules() if type(part) in COMPUTE]
    for block in blocks:
        block.__class__ = _unpadded(type(block))  # type: ignore[arg-type]
        block.reads_first = block is blocks[-1]  # type: ignore[assignment]


@cache
def _unpadded(kind: type[nn.Module]) -> type[nn.Module]:
    padded: Callable[..., Any] = kind.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "cu_seq_lens" not in kwargs:
            return padded(self, hidden_states, *args, **kwargs)
        hidden, ends, compute = hidden_states[0], kwargs["cu_seq_lens"], COMPUTE[kind]
        if compute is None:
            found = padded(self, hidden_states, *args, **kwargs)[0]
            found = found[ends[:-1].long()] if self.reads_first else found
        else:
            rows = hidden[ends[:-1].long()] if self.reads_first else hidden
            found = compute(self, rows, hidden, kwargs["lengths"], ends)
        return found[:, None] if self.reads_first else found[None]

    # Of the same name: plans name the blocks, and transformers those that are not to be split.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _of_distilbert(block: Any, rows: Tensor, hidden: Tensor, lengths: Lengths, ends: Tensor) -> Tensor:
    attention = block.attention
    heads = attention.q_lin(rows), attention.k_lin(hidden), attention.v_lin(hidden)
    rate = attention.dropout.p if block.training else 0.0
    attended = attend(*_by_heads(heads, attention.attention_head_size), lengths, ends, rate)
    attended = block.sa_layer_norm(attention.out_lin(attended) + rows)
    return block.output_layer_norm(block.ffn(attended) + attended)


def _of_bert(block: Any, rows: Tensor, hidden: Tensor, lengths: Lengths, ends: Tensor) -> Tensor:
    attention = block.attention.self
    heads = attention.query(rows), attention.key(hidden), attention.value(hidden)
    rate = attention.dropout.p if block.training else 0.0
    attended = attend(*_by_heads(heads, attention.attention_head_size), lengths, ends, rate)
    return block.feed_forward_chunk(block.attention.output(attended, rows))


def _by_heads(parts: Iterable[Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (part.unflatten(-1, (-1, size)) for part in parts)
    return query, key, value


COMPUTE: dict[type[nn.Module], Callable[..., Tensor] | None] = {
    TransformerBlock: _of_distilbert,
    BertLayer: _of_bert,
    BigBirdLayer: _of_bert,
    RobertaLayer: _of_bert,
    XLMRobertaLayer: _of_bert,
    ModernBertEncoderLayer: None,
}
"""How a block of each class computes ``(block, rows, hidden, lengths, ends)``: ``rows`` ask, ``hidden`` answers.
``None``: as transformers has it, of all tokens, with the attention of packed_attention.py."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Lengths,
    ends: Tensor,
    dropout: float,
    pattern: Pattern = FULL,
) -> Tensor:
    """Attention of each text within itself, without a mask over several.

    Args:
        query: (tokens, heads, size), or (texts, heads, size): of the first token of each text.
        key, value: (tokens, heads, size); a divisor of the query's heads, and the size of a value may be another.
        lengths: tokens of each text.
        ends: where each text begins and the last one ends, int32 (texts + 1,).
        dropout: share of the attention weights that is dropped.
        pattern: what a token attends to: by default all tokens of its text.

    Returns:
        As many rows as ``query``: (…, heads × size of a value).
    """
    kind, parts = query.device.type, (query, key, value)
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # As for torch's own attention: rotated queries and keys have the type of the residual stream, fp32.
        lower = torch.get_autocast_dtype(kind)
        parts = query.to(lower), key.to(lower), value.to(lower)
    if takes_flash(parts[0], parts[2], dropout, pattern):
        return _flash(*parts, lengths, ends, dropout, pattern)
    return _without_flash(query, key, value, lengths, ends, dropout, pattern)


def takes_flash(query: Tensor, value: Tensor, dropout: float, pattern: Pattern = FULL) -> bool:
    """Whether flash attention computes packed texts like these: one call, whatever their number."""
    size = query.shape[-1]
    if (
        query.device.type != "cuda"
        or torch.version.hip is not None
        or query.dtype not in (torch.float16, torch.bfloat16)
    ):
        return False
    if size % 8 or size > 256 or size != value.shape[-1] or pattern.softcap is not None or pattern.sinks is not None:
        return False
    capability = torch.cuda.get_device_capability(query.device)  # in a plan, of the GPU that is planned for
    # Torch's check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: too little shared memory.
    is_small = capability[0] == 12 or (8, 6) <= capability <= (8, 9)
    return capability >= (8, 0) and not (is_small and size > 192 and (size <= 224 or dropout > 0))


def _flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor, dropout: float, pattern: Pattern
) -> Tensor:
    """Flash attention over packed texts.

    Calls the operator below torch's ``varlen_attn``. That function has no dropout. On some GPUs it also prefers cuDNN,
    which builds a new plan, in about 40 ms, for every number of tokens (pytorch/pytorch pull request 191576).
    """
    first = len(query) == len(ends) - 1
    starts = torch.arange(len(ends), dtype=ends.dtype, device=ends.device) if first else ends
    longest, far = lengths.longest, -1 if pattern.window is None else pattern.window - 1
    found = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        starts,
        ends,
        1 if first else longest,
        longest,
        dropout,
        pattern.causal and pattern.window is None,
        False,
        scale=pattern.scale,
        window_size_left=far,
        window_size_right=0 if pattern.causal else far,
    )
    return found[0].flatten(1)


@torch.compiler.disable  # lengths differ in every micro-batch: no code is worth compiling for them
def _without_flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor, dropout: float, pattern: Pattern
) -> Tensor:
    first, on_cpu = len(query) == len(lengths.tokens), query.device.type == "cpu"
    plain = pattern.softcap is None and pattern.sinks is None
    is_seen = pattern.window is None or pattern.window >= lengths.longest
    rows = lengths.longest * len(lengths.tokens)
    if not on_cpu and dropout and plain and is_seen and rows <= MAX_PADDING * len(key):
        return _padded(query, key, value, lengths, ends, dropout, pattern)
    # Texts of one length share a kernel on a GPU; on a CPU what a text needs may stay in the cache.
    groups = [(n, 1) for n in lengths.tokens]
    if not on_cpu:
        groups = [(n, len(list(same))) for n, same in groupby(lengths.tokens)]
    tokens = [length * count for length, count in groups]
    asked = [count for _, count in groups] if first else tokens
    own = on_cpu and dropout and pattern is FULL and query.dtype in (torch.float32, torch.float64)
    options: dict[str, Any] = {"enable_gqa": True} if key.shape[1] < query.shape[1] else {}
    found = []
    for (length, count), *parts in zip(groups, query.split(asked), key.split(tokens), value.split(tokens), strict=True):
        # (texts, heads, tokens, size)
        queries, keys, values = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in parts)
        if own:
            text = _DroppedAttention.apply(queries, keys, values, dropout)
        elif not plain:
            text = weighed(queries, keys, values, pattern.mask(length, query.device), dropout, pattern)
        else:
            whole = pattern.window is None or pattern.window >= length
            mask = None if whole else pattern.mask(length, query.device)
            options |= {"is_causal": pattern.causal and mask is None, "scale": pattern.scale}
            text = scaled_dot_product_attention(queries, keys, values, mask, dropout, **options)
        found.append(text.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).flatten(1)


def _padded(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor, dropout: float, pattern: Pattern
) -> Tensor:
    """One call of attention over the texts, each padded to the longest one.

    Used with dropout on GPUs that have no flash attention for these tensors. A call for each length would launch some
    60 operations each.
    """
    texts, longest = len(lengths.tokens), lengths.longest
    places, mask = lengths.padding(ends)
    first = len(query) == texts
    rows = [
        part[:, None]
        if first and part is query
        else _Spread.apply(part, places, texts * longest).unflatten(0, (texts, -1))
        for part in (query, key, value)
    ]
    queries, keys, values = (part.transpose(1, 2) for part in rows)  # (texts, heads, tokens, size)
    options: dict[str, Any] = {"enable_gqa": True} if key.shape[1] < query.shape[1] else {}
    # What is after a text, no query of that text may see: with a causal pattern it does not.
    seen = None if pattern.causal else mask
    found = scaled_dot_product_attention(
        queries, keys, values, seen, dropout, pattern.causal, scale=pattern.scale, **options
    )
    found = found.transpose(1, 2).flatten(2)
    return found[:, 0] if first else _Gather.apply(found.flatten(0, 1), places)


class _Spread(torch.autograd.Function):
    """Rows at other places, and zeros between them. No place is given twice, so that nothing has to be added up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(length, *rows.shape[1:]).index_copy_(0, places, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    """The rows at places of which none is given twice: the inverse of :class:`_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.length = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.length, *gradient.shape[1:]).index_copy_(0, places, gradient), None


def weighed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, pattern: Pattern) -> Tensor:
    """Attention by scores that torch's kernels do not compute, of ``(texts, heads, tokens, size)``; a mask is bool."""
    key, value = _repeated(key, query, 1), _repeated(value, query, 1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if pattern.scale is None else pattern.scale)
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # not -inf: padding may see nothing
    if pattern.sinks is not None:
        sinks = pattern.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., : key.shape[2]]
    return drop_out(weights.to(value.dtype), dropout) @ value


def _repeated(keys: Tensor, query: Tensor, dim: int) -> Tensor:
    """Of keys or values that queries share, one for each head of the queries."""
    return keys.repeat_interleave(query.shape[dim] // keys.shape[dim], dim)


class _DroppedAttention(torch.autograd.Function):
    """Attention with dropout on a CPU, for which torch has no fused kernel.

    Torch draws a random number for each weight and keeps several tensors of weights; this takes an eighth of the random
    numbers and keeps a byte for each weight: the rest is computed again, of ``ROWS`` queries at a time.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Of ``(texts, heads, tokens, size)``; see ``scaled_dot_product_attention``."""
        dropped = min(round(dropout * 2**BITS), 2**BITS - 1)
        ctx.scales = query.shape[-1] ** -0.5, 1 / (1 - dropped / 2**BITS)
        scaled, found, kept = value * ctx.scales[1], [], []
        for rows in query.split(ROWS, 2):
            weights = _weights(rows, key, ctx.scales[0])
            kept.append(draw_kept(weights, weights.shape, dropped))
            # No product is changed in place: selective checkpointing keeps the products as they are.
            found.append(_drop(weights, kept[-1]) @ scaled)
        ctx.save_for_backward(query, key, value, *kept)
        return torch.cat(found, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *kept = ctx.saved_tensors
        scale, of_kept = ctx.scales
        of_query, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
        for rows, up, here in zip(query.split(ROWS, 2), (gradient * of_kept).split(ROWS, 2), kept, strict=True):
            weights = _weights(rows, key, scale)
            of_weights = _drop(up @ value.transpose(-2, -1), here)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(scale)
            of_query.append(of_scores @ key)
            of_key += of_scores.transpose(-2, -1) @ rows
            of_value += _drop(weights, here).transpose(-2, -1) @ up
        return torch.cat(of_query, 2), of_key, of_value, None


def draw_kept(weights: Tensor, shape: torch.Size, dropped: int) -> Tensor:
    """Which of ``shape``, (texts, heads, queries, keys), are kept: of 2^16, ``dropped`` are not; where ``weights`` are.

    A mode that overrides torch's functions overrides this one, too: with ``memory.tensor_parallel`` those of all heads
    are drawn.
    """
    if has_torch_function_unary(weights):
        return handle_torch_function(draw_kept, (weights,), weights, shape, dropped)
    # Of 64 random bits, four integers from -2^15 on.
    bits = torch.empty(-(-shape.numel() * BITS // 64), dtype=torch.int64, device=weights.device)
    numbers = bits.random_(-(2**63), None).view(torch.int16)[: shape.numel()]
    return (numbers >= dropped - 2 ** (BITS - 1)).view(shape)


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return torch.softmax((query * scale) @ key.transpose(-2, -1), -1)


def _drop(weights: Tensor, kept: Tensor) -> Tensor:
    """``weights``, in place, without those that are not kept. A byte becomes a number in a third of a bool's time."""
    return weights.mul_(kept.view(torch.uint8).to(weights.dtype))
