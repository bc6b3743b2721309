"""BigBird, with the faults of its implementation in transformers mended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from trainer.errors import require, require_choice
from trainer.models.text import TextClassifier
from trainer.values import Loss

if TYPE_CHECKING:
    from torch import nn

Attention = Literal["full", "block_sparse"]


@dataclass
class BigBird(TextClassifier):
    """BigBird (Zaheer et al. 2020) for long texts.

    Args:
        attention: full attends to every token through torch's fused attention: exact, without a (tokens × tokens)
            tensor, and faster than transformers' block_sparse, which stores one, plans its random blocks in NumPy in
            every layer of every forward, and turns itself into full attention for good at the first short batch.
            block_sparse is the pattern of the paper; it needs memory.precision 32-true or 64-true.
        name: where the configuration comes from: a hub id, a local folder, or big_bird.
        config: entries of the configuration to override, such as {num_hidden_layers: 2}.
    """

    name: str = "big_bird"
    attention: Attention = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.attention", self.attention, Attention)

    def _finished(self, module: nn.Module) -> nn.Module:
        """The module, with fused full attention unless told otherwise, and the pooler that no loss reaches frozen."""
        module = super()._finished(module)
        if self.attention == "full":
            use_fused_attention(module)
        # DDP waits for every parameter that may get a gradient; the classifier reads the first token, not the pooler.
        module.bert.pooler.requires_grad_(False)  # type: ignore[union-attr]
        return module

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """As BERT's, for full attention: block_sparse draws its random blocks head by head."""
        fix = "use model.attention full, or memory.strategy fsdp"
        sparse = f"memory.tensor_parallel cannot share the heads of model.attention={self.attention}"
        require(self.attention == "full", f"{sparse}: {fix}")
        return super().tensor_parallel_plan(module)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        """As any text classifier; short block-sparse batches are padded to where the pattern is defined."""
        if self.attention == "block_sparse":
            batch = pad_for_blocks(batch, module)
        return super().losses(module, batch)

    def _configuration(self) -> Any:
        config = super()._configuration()
        config.attention_type = "original_full" if self.attention == "full" else "block_sparse"
        return config


def use_fused_attention(module: nn.Module) -> None:
    """Make every full-attention layer of BigBird compute through ``scaled_dot_product_attention``.

    Only the class of the layers changes: parameters, their names and the result stay.
    """
    plain, fused = _attention_classes()
    for layer in module.modules():
        if type(layer) is plain:
            layer.__class__ = fused


@cache
def _attention_classes() -> tuple[type, type]:
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.models.big_bird.modeling_big_bird import BigBirdSelfAttention

    class FusedSelfAttention(BigBirdSelfAttention):
        """BigBirdSelfAttention for an encoder, in fused attention."""

        def forward(self, hidden_states: Any, attention_mask: Any = None, *_: Any, **__: Any) -> Any:
            heads = (*hidden_states.shape[:-1], -1, self.attention_head_size)
            projections = (self.query, self.key, self.value)
            query, key, value = (linear(hidden_states).view(heads).transpose(1, 2) for linear in projections)
            dropout = self.dropout.p if self.training else 0.0
            context = scaled_dot_product_attention(query, key, value, attention_mask, dropout)
            return context.transpose(1, 2).flatten(2), None

    return BigBirdSelfAttention, FusedSelfAttention


def pad_for_blocks(batch: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Pad to one block more than the length at which transformers would switch to full attention for good."""
    from torch.nn.functional import pad

    config: Any = getattr(module, "module", module).config  # DDP hides it
    least = (5 + 2 * config.num_random_blocks + 1) * config.block_size
    missing = least - batch["input_ids"].shape[1]
    if missing <= 0:
        return batch
    padded = {key: pad(value, (0, missing)) for key, value in batch.items() if key not in ("input_ids", "labels")}
    return batch | padded | {"input_ids": pad(batch["input_ids"], (0, missing), value=config.pad_token_id)}
