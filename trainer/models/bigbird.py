"""BigBird, without the faults of its implementation in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainer.errors import require, require_choice
from trainer.models.text import TextClassifier

if TYPE_CHECKING:
    from torch import nn

Attention = Literal["full", "block_sparse"]
ATTENTION_TYPES = {"full": "original_full", "block_sparse": "block_sparse"}  # as transformers names them


def adapt_bigbird(module: Any, attention: Attention) -> Any:
    """Replace the attention of a BigBird of transformers, and freeze its pooler."""
    from trainer.models.block_sparse import replace_attention

    replace_attention(module)
    # DDP waits for every trainable parameter, and our heads do not read the pooler.
    module.bert.pooler.requires_grad_(False)
    module.config.attention_type = ATTENTION_TYPES[attention]
    return module


@dataclass
class BigBird(TextClassifier):
    """BigBird (Zaheer et al. 2020) for long texts.

    Args:
        attention: full attends to every token through torch's fused attention; its result does not depend on how a
            batch is cut. block_sparse is the model's own pattern, exactly as transformers defines it: random blocks
            in training, the first block instead of them in evaluation. Short micro-batches (up to 704 tokens with
            the model's blocks of 64) use full attention. The pattern, and so the result, depends on the length that
            a micro-batch is padded to; it is therefore always padded. Neither stores a (tokens × tokens) tensor,
            except full with dropout on a CPU: one byte per pair of tokens.
        name: the source of the configuration: a hub id, a local folder, or big_bird.
        config: entries of the configuration to override, such as {num_hidden_layers: 2}.
    """

    name: str = "big_bird"
    attention: Attention = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.attention", self.attention, Attention)

    def _finalize_module(self, module: nn.Module) -> nn.Module:
        return adapt_bigbird(super()._finalize_module(module), self.attention)

    def _supports_unpadding(self, config: Any) -> bool:
        """Only full attention: the pattern of block_sparse depends on the padded length."""
        return self.attention == "full" and config.model_type == "big_bird"

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """Return BERT's plan; full attention only, because block_sparse draws its random blocks head by head."""
        cause = f"memory.tensor_parallel cannot split the heads of model.attention={self.attention}"
        require(self.attention == "full", f"{cause}: use model.attention full, or memory.strategy fsdp")
        return super().tensor_parallel_plan(module)

    def _configuration(self) -> Any:
        config = super()._configuration()
        config.attention_type = ATTENTION_TYPES["full"]  # the class that transformers builds; ours does both
        return config
