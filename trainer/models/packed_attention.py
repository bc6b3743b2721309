"""transformers models on packed rows: attention within each document, and the architectures certified for it.

The documents of a micro-batch are concatenated in one row without padding. All layers except attention work token by
token. Attention calls our function through transformers' ``AttentionInterface``. It knows where each document begins
and stores no (tokens x tokens) mask. A model may also mix tokens elsewhere, which only a test of that model can find:
``VERIFIED_ARCHITECTURES`` holds the results of benchmarks/packing.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.errors import RecipeError
from trainer.models.padding_free import Lengths, Pattern, eager_attention, pack, varlen_attention

NAME = "documents"
"""The ``attn_implementation`` that selects this attention."""

# fmt: off
VERIFIED_ARCHITECTURES: dict[str, str | None] = {
    **dict.fromkeys((
        "biogpt", "cohere", "cohere2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2",
        "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe", "helium", "llama", "ministral", "mistral",
        "mixtral", "modernbert-decoder", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe",
        "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2",
    )),
    "bamba": "BambaMixer", "bloom": "BloomAttention", "codegen": "CodeGenAttention", "falcon": "FalconAttention",
    "falcon_h1": "FalconH1Mixer", "falcon_mamba": "FalconMambaMixer", "gpt_neo": "GPTNeoAttention",
    "gptj": "GPTJAttention", "granitemoehybrid": "GraniteMoeHybridMambaLayer", "jamba": "JambaMambaMixer",
    "lfm2": "Lfm2ShortConv", "llama4_text": "Llama4TextAttention", "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer", "mpt": "MptAttention", "nemotron": "NemotronAttention", "phimoe": "PhimoeAttention",
    "qwen3_next": "Qwen3NextGatedDeltaNet", "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "rwkv": "RwkvSelfAttention", "stablelm": "StableLmAttention",
}
# fmt: on
"""Results of benchmarks/packing.py by model type: ``None`` if packed documents do not see each other and the gradient
equals the padded one, otherwise the module that violates this."""


def packed_document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    lengths: Lengths | None = None,
    cu_seq_lens: Tensor | None = None,
    sources: Tensor | None = None,
    kept: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' layers, from ``(n, heads, tokens, size)`` to ``(n, tokens, heads, size)``.

    With ``lengths`` and ``cu_seq_lens`` each document sees itself; otherwise ``sdpa`` plus ``softcap`` and ``s_aux``.
    For ``sources`` and ``kept``, documents that share tokens, see :func:`~trainer.models.preference.share_tokens`.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = Pattern(causal, sliding_window, scaling, softcap, s_aux)
    if lengths is not None and cu_seq_lens is not None:
        if kwargs.get("position_bias") is not None:
            cause = f"model.padding_free: {type(module).__name__} adds a bias to the attention scores"
            raise RecipeError(f"{cause}: set it to false")
        parts = (part[0].transpose(0, 1) for part in (query, key, value))
        rows, keys, values = parts if sources is None else (part.index_select(0, sources) for part in parts)
        found = varlen_attention(rows, keys, values, lengths, cu_seq_lens, dropout, pattern)
        found = found if kept is None else found.index_select(0, kept)
        return found.unflatten(-1, (query.shape[1], -1))[None], None
    if softcap is None and s_aux is None:
        given = query, key, value, attention_mask, dropout, scaling, is_causal
        return sdpa_attention_forward(module, *given, **kwargs)
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = Pattern(causal).mask(query.shape[2], query.device)
    return eager_attention(query, key, value, attention_mask, dropout, pattern).transpose(1, 2).contiguous(), None


def register_packed_attention() -> None:
    """Register the attention with transformers, with the masks of ``sdpa`` for padded micro-batches."""
    AttentionInterface.register(NAME, packed_document_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def unsupported_reason(config: Any) -> str | None:
    """Return the reason why models of this configuration cannot use packed rows, or ``None`` if they can."""
    kind, implementation = config.model_type, config._attn_implementation
    if kind not in VERIFIED_ARCHITECTURES:
        return f"benchmarks/packing.py has no certificate for model type {kind}"
    if (leak := VERIFIED_ARCHITECTURES[kind]) is not None:
        return f"its {leak} does not keep packed documents apart"
    if implementation not in (None, "sdpa", "eager", NAME):
        return f"its attention is set to {implementation}"
    if (rope := length_dependent_rope(config)) is not None:
        return f"rope_type {rope} rotates a document by the length of the longest in its micro-batch"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "its attention is not causal"
    if kind == "qwen2_moe" and "sliding_attention" in config.layer_types:
        return "its Qwen2MoeAttention does not pass its sliding window"
    return None


def length_dependent_rope(config: Any) -> str | None:
    """Return the ``rope_type`` if its rotations depend on the longest document of a micro-batch, or ``None``."""
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes, *(part for part in ropes.values() if isinstance(part, Mapping))]
    return next((part["rope_type"] for part in ropes if part.get("rope_type") in ("dynamic", "longrope")), None)


def dummy_mask() -> Tensor:
    """Return an unused mask: if given a mask of four dimensions, transformers creates none."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def pack_documents(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Pack the micro-batch of a language model into one row without padding; ``None`` for another format.

    Args:
        batch: on the host: ``input_ids``, ``attention_mask``, ``labels`` and any others, all ``(n, length)``.

    Returns:
        The tensors, ``(1, tokens)``, with a mask of one entry. The first label of each document is -100, so that
        nothing is predicted across documents. ``position_ids``, ``lengths`` and ``cu_seq_lens`` are those of
        :func:`~trainer.models.padding_free.pack`.
    """
    rest = {key: value for key, value in batch.items() if key != "labels"}
    packed = pack({**rest, "targets": batch["labels"]}, None)
    if packed is None:
        return None
    labels = packed.pop("targets")
    labels[:, packed["cu_seq_lens"][:-1].long()] = -100
    return {**packed, "labels": labels, "attention_mask": dummy_mask()}
