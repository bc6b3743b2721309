"""BigBird, with the faults of its implementation in transformers mended."""

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


@dataclass
class BigBird(TextClassifier):
    """BigBird (Zaheer et al. 2020) for long texts.

    Args:
        attention: full attends to every token through torch's fused attention; its result does not depend on how a
            batch is cut. block_sparse is the model's own pattern, exactly as transformers defines it, with the blocks
            that it draws in training and the first block in their place in evaluation; a micro-batch of texts too
            short for it (up to 704 tokens with the model's blocks of 64) attends fully. The pattern follows the
            length that a micro-batch is padded to, and with it the result, so it stays padded. Neither stores a
            (tokens × tokens) tensor, but for full with dropout on a CPU: a byte for each pair of tokens.
        name: where the configuration comes from: a hub id, a local folder, or big_bird.
        config: entries of the configuration to override, such as {num_hidden_layers: 2}.
    """

    name: str = "big_bird"
    attention: Attention = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("model.attention", self.attention, Attention)

    def _finished(self, module: nn.Module) -> nn.Module:
        """The module with our attention; the pooler, which no loss reaches, is frozen."""
        from trainer.models.block_sparse import use_own_attention

        module = super()._finished(module)
        use_own_attention(module)
        # DDP waits for every parameter that may get a gradient; the classifier reads the first token, not the pooler.
        module.bert.pooler.requires_grad_(False)  # type: ignore[union-attr]
        module.config.attention_type = ATTENTION_TYPES[self.attention]  # type: ignore[union-attr]
        return module

    def _has_known_blocks(self, config: Any) -> bool:
        """Those with full attention: the pattern of block_sparse follows the length that texts are padded to."""
        return self.attention == "full" and config.model_type == "big_bird"

    def tensor_parallel_plan(self, module: nn.Module) -> Mapping[str, str]:
        """As BERT's, for full attention: block_sparse draws its random blocks head by head."""
        fix = "use model.attention full, or memory.strategy fsdp"
        sparse = f"memory.tensor_parallel cannot share the heads of model.attention={self.attention}"
        require(self.attention == "full", f"{sparse}: {fix}")
        return super().tensor_parallel_plan(module)

    def _configuration(self) -> Any:
        config = super()._configuration()
        config.attention_type = ATTENTION_TYPES["full"]  # the layers that are built; ours do both
        return config
