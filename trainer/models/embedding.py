"""Embeddings of sentences, trained on pairs with in-batch negatives."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from trainer.contract import WholeBatch
from trainer.errors import require, require_choice
from trainer.models.text import PackedEncoder
from trainer.values import Loss, Task

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

Pooling = Literal["mean", "cls"]


@dataclass
class SentenceEmbedder(PackedEncoder, WholeBatch):
    """Any ``AutoModel`` of transformers that encodes texts: BERT, DistilBERT, RoBERTa, ModernBERT, ...

    A sample is a pair of texts that belong together, optionally with a text that does not (a hard negative). The loss
    is the cross entropy of finding the second text of each pair among those of all pairs of the batch, and the hard
    negatives, by cosine similarity: InfoNCE, or MultipleNegativesRankingLoss in sentence-transformers.

    Args:
        pooling: mean averages the tokens of a text, cls takes the first one.
        scale: factor of the cosine similarities, the inverse of the temperature.
        padding_free: skip padding. This changes only the masks of dropout. null enables it for DistilBERT, BERT,
            RoBERTa, XLM-RoBERTa and ModernBERT, except in subclasses with a custom module or custom embeddings.
        train_last_blocks: freeze everything except the last n blocks; null trains everything.
        lora: train adapters in the blocks instead of all weights.
    """

    name: str = "distilbert"
    tokenizer: str | None = None
    pooling: Pooling = "mean"
    scale: float = 20.0
    padding_free: bool | None = None

    auto = "AutoModel"
    head_is_new = False
    task: ClassVar[Task] = "pairs"  # type: ignore[misc]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.pooling", self.pooling, Pooling)
        require(self.scale > 0, f"model.scale={self.scale} must be greater than 0")
        self.reads_first_token = self.pooling == "cls"

    def _finalize_module(self, module: Any) -> nn.Module:
        module = super()._finalize_module(module)
        self._require_embeddings(module)
        if (pooler := getattr(module, "pooler", None)) is not None:
            pooler.requires_grad_(False)  # it is part of the checkpoint, but not of the embedding
        require(not module.config.is_encoder_decoder, f"model.name={self.name!r} has a decoder: use an encoder")
        left = getattr(self.tokenizer_or_none(), "padding_side", "right") == "left"
        cause = "model.pooling=cls reads the first token, but the tokenizer pads on the left"
        require(self.pooling != "cls" or not left, f"{cause}: use model.pooling mean")
        return module

    def _require_only_head_new(self, module: nn.Module, new: Collection[str]) -> None:
        super()._require_only_head_new(module, [name for name in new if not name.startswith("pooler.")])

    def embed(self, module: nn.Module, batch: Any) -> Tensor:
        """Return normalized embeddings, shape ``(n, texts per sample, size)``.

        The batch has ``input_ids`` and ``attention_mask`` of all texts, sample by sample, and ``labels`` ``(n,)``, or
        is ``packed``.
        """
        import torch

        inputs = {key: value for key, value in batch.items() if key != "labels"}
        hidden = module(**inputs).last_hidden_state
        hidden = hidden.float() if hidden.dtype.itemsize == 2 else hidden
        if self.pooling == "cls":
            texts = hidden[:, 0]
        elif "cu_seq_lens" in inputs:
            counts, tokens = inputs["cu_seq_lens"].diff(), hidden[0]
            order = torch.arange(len(counts), device=counts.device)
            places = order.repeat_interleave(counts, output_size=len(tokens))  # without a GPU sync
            texts = tokens.new_zeros(len(counts), tokens.shape[1]).index_add(0, places, tokens) / counts[:, None]
        else:
            mask = inputs["attention_mask"][..., None]
            texts = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(texts, dim=-1).unflatten(0, (len(batch["labels"]), -1))

    def loss_of_all(self, embeddings: Tensor) -> Loss:
        """Return the loss of a batch; without gradients also the rank of each pair's second text, for metrics."""
        import torch

        candidates = embeddings[:, 1:].transpose(0, 1).flatten(0, 1)  # those of the pairs, then hard negatives
        scores = embeddings[:, 0] @ candidates.T * self.scale
        pairs = torch.arange(len(scores), device=scores.device)
        total = torch.nn.functional.cross_entropy(scores, pairs, reduction="sum")
        if embeddings.requires_grad:
            return Loss(total, float(len(pairs)))
        ranks = (scores >= scores.gather(1, pairs[:, None])).sum(1)  # 1 is the best; ties count as wrong
        return Loss(total, float(len(pairs)), logits=ranks.to(scores.dtype), targets=pairs)

    def save(self, module: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write a folder that transformers' ``AutoModel`` and sentence-transformers load."""
        super().save(module, folder, state)
        modules = []
        for number, kind in enumerate(("Transformer", "Pooling", "Normalize")):
            path = f"{number}_{kind}" if number else ""
            (folder / path).mkdir(exist_ok=True)
            kind = f"sentence_transformers.models.{kind}"
            modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
        pooling = {"word_embedding_dimension": cast(Any, module).config.hidden_size}
        pooling |= {"pooling_mode_cls_token": self.pooling == "cls", "pooling_mode_mean_tokens": self.pooling == "mean"}
        (folder / "modules.json").write_text(json.dumps(modules, indent=2))
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2))
