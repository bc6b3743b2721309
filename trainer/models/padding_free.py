"""transformers encoders without padding: the texts of a micro-batch are concatenated.

Linear layers, norms and activation functions see one row of tokens; attention works within each text. For a classifier,
whose head reads no other token, the last block computes queries, projections and its feed-forward network only for the
first token of each text. The result equals that of the padded micro-batch. The idea is known as
"padding-free" or "unpadded" training (MosaicBERT, Portes et al. 2023; ModernBERT, Warner et al. 2024).
"""

from __future__ import annotations

import sys
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

DROPOUT_BITS = 16  # random bits per attention weight for dropout on a CPU: the rate is rounded to 2^-16
MAX_PADDING = 4  # max ratio of padded rows to tokens for a single padded call of attention on a GPU
QUERY_CHUNK = 256  # queries at a time, for dropout on a CPU, because a long text's weights exceed the cache


class Lengths:
    """The number of tokens of each text, in a wrapper: for a list, torch would recompile for every number of texts."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.longest = tokens, max(tokens)
        self._padding: tuple[Tensor, Tensor] | None = None

    def padding(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions in padded texts, int64 ``(tokens,)``, and the bool key mask ``(texts, 1, 1, longest)``."""
        if self._padding is None:
            begins, counts, texts = ends[:-1].long(), ends.diff(), len(self.tokens)
            moves = torch.arange(texts, device=ends.device) * self.longest - begins
            total = sum(self.tokens)  # avoids a GPU sync
            moved = moves.repeat_interleave(counts, output_size=total)
            seen = torch.arange(self.longest, device=ends.device) < counts[:, None]
            self._padding = torch.arange(total, device=ends.device) + moved, seen[:, None, None]
        return self._padding


class Pattern(NamedTuple):
    """The attention pattern within a text, and how scores become weights."""

    causal: bool = False  # a token sees only itself and earlier tokens
    window: int | None = None  # a token sees tokens at a distance below this
    scale: float | None = None  # factor of the scores; None for 1 / sqrt(size of a head)
    softcap: float | None = None  # caps scores: softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # (heads,): scores of an extra key without a value

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        """Return the mask of visible keys for one text, bool (length, length), or ``None`` if all are visible."""
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
    """Remove the padding of the micro-batch; ``None`` for another format, or if a text does not start in column 0.

    Args:
        batch: on the host: ``attention_mask`` ``(n, length)``, others of that shape, and ``labels``, which stay.
        padding_idx: the padding token of models whose positions start after its id and skip padding tokens.

    Returns:
        The others and ``position_ids``, ``(1, tokens)``; ``lengths``, a :class:`Lengths`; and ``cu_seq_lens``,
        the start of each text and the end of the last, int32 ``(n + 1,)``.
    """
    mask = batch["attention_mask"].bool()
    others = {key: value for key, value in batch.items() if key not in ("attention_mask", "labels")}
    if mask.ndim != 2 or any(getattr(value, "shape", ())[:2] != mask.shape for value in others.values()):
        return None
    tokens, columns = mask.sum(1), torch.arange(mask.shape[1])
    if not (mask == (columns < tokens[:, None])).all() or not tokens.all():
        return None
    packed = {key: value[mask][None] for key, value in others.items()}
    positions = columns.expand_as(mask)
    if padding_idx is not None:  # like RobertaEmbeddings: a text may contain the padding token
        counted = (batch["input_ids"] != padding_idx).long()
        positions = counted.cumsum(1) * counted + padding_idx
    packed.setdefault("position_ids", positions[mask][None])
    ends = torch.nn.functional.pad(tokens.cumsum(0), (1, 0)).to(torch.int32)
    rest = {"labels": batch["labels"]} if "labels" in batch else {}
    return {**packed, "cu_seq_lens": ends, "lengths": Lengths(tokens.tolist()), **rest}


def unpad(module: nn.Module, reads_first: bool = True) -> None:
    """Make the blocks of ``module`` accept packed micro-batches by swapping ``__class__``, which keeps names. The last
    one computes only the first token of each text if ``reads_first``."""
    blocks = [part for part in module.modules() if _block_name(type(part)) in BLOCK_FORWARDS]
    for block in blocks:
        block.__class__ = _unpadded(type(block))  # type: ignore[arg-type]
        block.reads_first = reads_first and block is blocks[-1]  # type: ignore[assignment]


@cache
def _unpadded(kind: type[nn.Module]) -> type[nn.Module]:
    padded: Callable[..., Any] = kind.forward
    compute = BLOCK_FORWARDS[_block_name(kind) or ""]

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "cu_seq_lens" not in kwargs:
            return padded(self, hidden_states, *args, **kwargs)
        hidden, ends = hidden_states[0], kwargs["cu_seq_lens"]
        if compute is None:
            found = padded(self, hidden_states, *args, **kwargs)[0]
            found = found[ends[:-1].long()] if self.reads_first else found
        else:
            rows = hidden[ends[:-1].long()] if self.reads_first else hidden
            found = compute(self, rows, hidden, kwargs["lengths"], ends)
        return found[:, None] if self.reads_first else found[None]

    # Keep the class name: plans use it to name the blocks, and transformers to find modules that must not be split.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _distilbert_block(block: Any, rows: Tensor, hidden: Tensor, lengths: Lengths, ends: Tensor) -> Tensor:
    attention = block.attention
    heads = attention.q_lin(rows), attention.k_lin(hidden), attention.v_lin(hidden)
    attended = _attended(attention, heads, lengths, ends)
    attended = block.sa_layer_norm(attention.out_lin(attended) + rows)
    return block.output_layer_norm(block.ffn(attended) + attended)


def _bert_block(block: Any, rows: Tensor, hidden: Tensor, lengths: Lengths, ends: Tensor) -> Tensor:
    attention = block.attention.self
    heads = attention.query(rows), attention.key(hidden), attention.value(hidden)
    return block.feed_forward_chunk(block.attention.output(_attended(attention, heads, lengths, ends), rows))


def _attended(attention: Any, parts: Iterable[Tensor], lengths: Lengths, ends: Tensor) -> Tensor:
    query, key, value = (part.unflatten(-1, (-1, attention.attention_head_size)) for part in parts)
    return varlen_attention(query, key, value, lengths, ends, attention.dropout.p if attention.training else 0.0)


BLOCK_FORWARDS: dict[str, Callable[..., Tensor] | None] = {
    "distilbert.modeling_distilbert.TransformerBlock": _distilbert_block,
    "bert.modeling_bert.BertLayer": _bert_block,
    "big_bird.modeling_big_bird.BigBirdLayer": _bert_block,
    "roberta.modeling_roberta.RobertaLayer": _bert_block,
    "xlm_roberta.modeling_xlm_roberta.XLMRobertaLayer": _bert_block,
    "modernbert.modeling_modernbert.ModernBertEncoderLayer": None,
}
"""Forward function by block class of transformers.models, of ``(block, rows, hidden, lengths, ends)``: ``rows`` give
the queries, ``hidden`` the keys and values. ``None``: transformers' forward for all tokens, with the attention of
packed_attention.py. Names, because importing all of these modules takes half a second."""


def _block_name(kind: type[nn.Module]) -> str | None:
    """Return the key of ``kind`` in ``BLOCK_FORWARDS``; ``None`` for a class that ``_unpadded`` has made."""
    is_original = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return f"{kind.__module__.removeprefix('transformers.models.')}.{kind.__name__}" if is_original else None


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor, dropout: float, pattern: Pattern = FULL
) -> Tensor:
    """Compute attention within each text, without a mask over several texts.

    Args:
        query: (tokens, heads, size), or (texts, heads, size) for the first token of each text only.
        key, value: (tokens, heads, size). Their heads divide the query's; a value's size may differ.
        lengths: number of tokens of each text.
        ends: the start of each text and the end of the last, int32 (texts + 1,).
        dropout: dropout rate of the attention weights.
        pattern: the visible keys of each query: by default all tokens of its text.

    Returns:
        One row per row of ``query``: (…, heads × size of a value).
    """
    kind, parts = query.device.type, (query, key, value)
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # As autocast does for torch's attention: rotated queries and keys have the residual stream's dtype, fp32.
        lower = torch.get_autocast_dtype(kind)
        parts = query.to(lower), key.to(lower), value.to(lower)
    if takes_flash(parts[0], parts[2], dropout, pattern):
        return _flash(*parts, lengths, ends, dropout, pattern)
    return _without_flash(query, key, value, lengths, ends, dropout, pattern)


def takes_flash(query: Tensor, value: Tensor, dropout: float, pattern: Pattern = FULL) -> bool:
    """Return whether flash attention supports these packed texts, in one call for any number of texts."""
    size = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type != "cuda" or torch.version.hip is not None or not is_half:
        return False
    if size % 8 or size > 256 or size != value.shape[-1] or pattern.softcap is not None or pattern.sinks is not None:
        return False
    capability = torch.cuda.get_device_capability(query.device)  # in a plan, of the simulated GPU
    # Torch's check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: too little shared memory.
    is_small = capability[0] == 12 or (8, 6) <= capability <= (8, 9)
    return capability >= (8, 0) and not (is_small and size > 192 and (size <= 224 or dropout > 0))


def _flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor, dropout: float, pattern: Pattern
) -> Tensor:
    """Compute flash attention over packed texts.

    This calls the operator below torch's ``varlen_attn``, which has no dropout and on some GPUs prefers cuDNN: it takes
    about 40 ms for every new number of tokens (pytorch/pytorch pull request 191576).
    """
    first = len(query) == len(ends) - 1
    starts = torch.arange(len(ends), dtype=ends.dtype, device=ends.device) if first else ends
    longest, far = lengths.longest, -1 if pattern.window is None else pattern.window - 1
    texts = starts, ends, 1 if first else longest, longest
    window = {"window_size_left": far, "window_size_right": 0 if pattern.causal else far}
    is_causal = pattern.causal and pattern.window is None
    flash = torch.ops.aten._flash_attention_forward
    return flash(query, key, value, *texts, dropout, is_causal, False, scale=pattern.scale, **window)[0].flatten(1)


@torch.compiler.disable  # lengths differ in every micro-batch, so compiled code would not be reused
def _without_flash(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor, dropout: float, pattern: Pattern
) -> Tensor:
    first, on_cpu = len(query) == len(lengths.tokens), query.device.type == "cpu"
    plain = pattern.softcap is None and pattern.sinks is None
    is_seen = pattern.window is None or pattern.window >= lengths.longest
    rows = lengths.longest * len(lengths.tokens)
    if not on_cpu and dropout and plain and is_seen and rows <= MAX_PADDING * len(key):
        return _padded(query, key, value, lengths, ends, dropout, pattern)
    # On a GPU, texts of equal length share a kernel. On a CPU, single texts make better use of the cache.
    groups = [(n, 1) for n in lengths.tokens] if on_cpu else [(n, len([*same])) for n, same in groupby(lengths.tokens)]
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
            text = eager_attention(queries, keys, values, pattern.mask(length, query.device), dropout, pattern)
        else:
            mask = None if pattern.window is None or pattern.window >= length else pattern.mask(length, query.device)
            options |= {"is_causal": pattern.causal and mask is None, "scale": pattern.scale}
            text = scaled_dot_product_attention(queries, keys, values, mask, dropout, **options)
        found.append(text.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).flatten(1)


def _padded(
    query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, ends: Tensor, dropout: float, pattern: Pattern
) -> Tensor:
    """Compute attention in one call over the texts, each padded to the longest.

    Used with dropout on GPUs without flash attention, where a call per length would launch some 60 operations each.
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
    # The padding after a text must be masked. A causal pattern never sees it.
    found = scaled_dot_product_attention(
        queries, keys, values, None if pattern.causal else mask, dropout, pattern.causal, scale=pattern.scale, **options
    )
    found = found.transpose(1, 2).flatten(2)
    return found[:, 0] if first else _Gather.apply(found.flatten(0, 1), places)


class _Spread(torch.autograd.Function):
    """Scatters rows to unique positions and fills the rest with zeros. Unique positions need no addition."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(length, *rows.shape[1:]).index_copy_(0, places, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    """Gathers rows from unique positions: the inverse of :class:`_Spread`."""

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


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, pattern: Pattern
) -> Tensor:
    """Compute attention of ``(texts, heads, tokens, size)`` with softcap or sinks, which torch's kernels lack."""
    key, value = _repeat_kv(key, query, 1), _repeat_kv(value, query, 1)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if pattern.scale is None else pattern.scale)
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min  # not -inf, because padding may have no visible key
        scores = scores.masked_fill(~mask, lowest)
    if pattern.sinks is not None:
        sinks = pattern.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))[..., : key.shape[2]]
    return drop_out(weights.to(value.dtype), dropout) @ value


def _repeat_kv(keys: Tensor, query: Tensor, dim: int) -> Tensor:
    return keys.repeat_interleave(query.shape[dim] // keys.shape[dim], dim)


class _DroppedAttention(torch.autograd.Function):
    """Attention with dropout on a CPU, for which torch has no fused kernel.

    Torch draws a random number per weight and keeps several tensors of weights. This needs an eighth of the random
    numbers and keeps one byte per weight; the rest is recomputed for ``QUERY_CHUNK`` queries at a time.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """Compute ``scaled_dot_product_attention`` of ``(texts, heads, tokens, size)``."""
        dropped = min(round(dropout * 2**DROPOUT_BITS), 2**DROPOUT_BITS - 1)
        ctx.scales = query.shape[-1] ** -0.5, 1 / (1 - dropped / 2**DROPOUT_BITS)
        scaled, found, kept = value * ctx.scales[1], [], []
        for rows in query.split(QUERY_CHUNK, 2):
            weights = _weights(rows, key, ctx.scales[0])
            kept.append(draw_dropout_mask(weights, weights.shape, dropped))
            # Do not change a product in place, because selective checkpointing keeps it.
            found.append(_apply_dropout(weights, kept[-1]) @ scaled)
        ctx.save_for_backward(query, key, value, *kept)
        return torch.cat(found, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *kept = ctx.saved_tensors
        scale, of_kept = ctx.scales
        of_query, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
        queries, gradients = (tensor.split(QUERY_CHUNK, 2) for tensor in (query, gradient * of_kept))
        for rows, up, here in zip(queries, gradients, kept, strict=True):
            weights = _weights(rows, key, scale)
            of_weights = _apply_dropout(up @ value.transpose(-2, -1), here)
            of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype).mul_(scale)
            of_query.append(of_scores @ key)
            of_key += of_scores.transpose(-2, -1) @ rows
            of_value += _apply_dropout(weights, here).transpose(-2, -1) @ up
        return torch.cat(of_query, 2), of_key, of_value, None


def draw_dropout_mask(weights: Tensor, shape: torch.Size, dropped: int) -> Tensor:
    """Draw a keep mask of ``shape``, (texts, heads, queries, keys), on the device of ``weights``.

    The drop rate is ``dropped`` / 2^16. Modes can override this: ``memory.tensor_parallel`` draws it for all heads.
    """
    if has_torch_function_unary(weights):
        return handle_torch_function(draw_dropout_mask, (weights,), weights, shape, dropped)
    # Split 64 random bits into four 16-bit integers.
    bits = torch.empty(-(-shape.numel() * DROPOUT_BITS // 64), dtype=torch.int64, device=weights.device)
    numbers = bits.random_(-(2**63), None).view(torch.int16)[: shape.numel()]
    return (numbers >= dropped - 2 ** (DROPOUT_BITS - 1)).view(shape)


def _weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    return torch.softmax((query * scale) @ key.transpose(-2, -1), -1)


def _apply_dropout(weights: Tensor, kept: Tensor) -> Tensor:
    """Zero the dropped ``weights`` in place. Bytes convert three times faster than bools."""
    return weights.mul_(kept.view(torch.uint8).to(weights.dtype))
