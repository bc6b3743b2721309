"""Tiny language models of every family, and ragged sequences to train them on."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from trainer.models import CausalLM, packed_attention
from trainer.models.padding_free import Lengths

WORDS = 97
_SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": WORDS, "pad_token_id": None}
_GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": WORDS}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2),
    "llama": ("llama", _SIZES),
    "qwen3": ("qwen3", _SIZES | {"head_dim": 8}),
    "gemma": ("gemma", _SIZES | {"head_dim": 8}),
    "gemma2": ("gemma2", _SIZES | {"head_dim": 8, "final_logit_softcapping": 1.5}),
    "gemma3": ("gemma3_text", _SIZES | {"head_dim": 8, "final_logit_softcapping": 1.5, "sliding_window": 8}),
    "smollm2": ("llama", _SIZES | {"tie_word_embeddings": True}),
}
"""The model type and the configuration of each; the head of llama is its own, that of the others is tied."""

EXACT = tuple(family for family in FAMILIES if family != "gemma2")
"""Those whose attention is computed in fp64 if asked to: that of gemma2 takes its softmax in fp32 all the same."""


@dataclass
class Precise(CausalLM):
    """One whose norms are computed in the precision of its weights: in transformers it is fp32, even in fp64."""

    def _finalize_module(self, module: nn.Module) -> nn.Module:
        return super()._finalize_module(precise(module))


def precise(module: nn.Module) -> nn.Module:
    """``module``, its norms computed in the precision of its weights."""
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = MethodType(_normed, part)  # type: ignore[assignment]
    return module


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    weight = norm.weight + type(norm).__name__.startswith("Gemma")
    return weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def language_model(family: str, **options: Any) -> CausalLM:
    """A model of two blocks without dropout, and without a tokenizer."""
    name, config = FAMILIES[family]
    config = config | options.pop("config", {})
    return Precise(name, **{"tokenizer": "none", "config": config, "dropout": 0.0, **options})


def language_samples(size: int, seed: int = 0, most: int = 40) -> list[dict[str, Tensor]]:
    """Samples of a language model, to be padded by ``problems.collate``; ``tiny.InMemory`` holds them.

    Sequences of 1 to ``most`` tokens; of every third one the first half is not to be predicted, of one nothing.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(1, most + 1, (size,), generator=generator).tolist()
    samples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(2, WORDS, (length,), generator=generator)
        labels = ids.clone()
        if number % 3 == 0:
            labels[: length // 2] = -100
        if number == 4:
            labels[:] = -100
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def textbook_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of the next tokens of a padded batch, from whole logits ``(n, length, words)``."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def textbook_of_module(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """That of what ``module`` gives; nothing of ours has touched it, or it gets no labels."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return textbook_of_logits(module(**inputs).logits, batch["labels"])


def plant_leaking_attention(monkeypatch: Any) -> None:
    """Plant a fault: a token sees all that is before it in the row, also of other texts."""
    within = packed_attention.varlen_attention

    def leaking(query: Any, key: Any, value: Any, lengths: Any, ends: Any, *rest: Any) -> Any:
        return within(query, key, value, Lengths([sum(lengths.tokens)]), ends[[0, -1]], *rest)

    monkeypatch.setattr(packed_attention, "varlen_attention", leaking)
