"""MLPs and norms of long texts, computed for a tile of the tokens at a time, in forward and in backward.

These layers treat every token alone, so the tiles' outputs are those of one call. Each tile is checkpointed: backward
computes its intermediate values again, and frees them before the next tile. Autograd sums the gradients of a weight
over the tiles before it runs the hooks that synchronise ranks. FSDP gathers a block's weights once for all its tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainer.errors import require
from trainer.weights.streaming import default_dtype

MIN_TILED_TOKENS, TILES = 32_768, 16
"""Tokens of a micro-batch from which ``model.tile_tokens=null`` uses tiles, and their number."""

CERTIFIED = ("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
"""Model types whose gradients with tiles are tested to be those without (tests/models/test_token_tiles.py)."""

TILED = ("MLP", "RMSNorm", "LayerNorm")
"""Ends of the names of the classes that are computed in tiles."""


def use_tiles(module: Any, tokens: int | None) -> None:
    """Compute MLPs and norms of ``module`` for ``tokens`` tokens at a time; 0 for all, ``None`` decides by length.

    Swapping ``__class__`` keeps parameters, names and hooks.
    """
    kind = module.config.model_type
    if kind not in CERTIFIED:
        require(not tokens, f"model.tile_tokens={tokens} is not certified for {kind}: use null, which needs no tiles")
        return
    for part in module.modules() if tokens != 0 else ():
        if type(part).__name__.endswith(TILED):
            part.__class__, part.tile_tokens = _tiled(cast(Any, type(part))), tokens
            part.tile_options = {"use_reentrant": False}  # memory/tensor_parallel.py adds a context


def num_tiles(tokens: int, size: int | None) -> int:
    """Return the number of tiles of a micro-batch of ``tokens`` tokens."""
    return -(-tokens // size) if size else TILES if tokens >= MIN_TILED_TOKENS else 1


@cache
def _tiled(kind: type[nn.Module]) -> type[nn.Module]:
    plain: Any = kind.forward

    def forward(self: Any, hidden: Tensor) -> Tensor:
        tiles = num_tiles(hidden.shape[:2].numel(), self.tile_tokens)
        if tiles == 1 or isinstance(hidden, DTensor):  # sequence parallelism has split the tokens
            return plain(self, hidden)
        rows, grows = hidden.flatten(0, -2).chunk(tiles), torch.is_grad_enabled()
        # In torch 2.11, a checkpoint in a recomputed block must begin with the default dtype that it had in forward.
        with default_dtype(hidden.dtype):
            found = [checkpoint(plain, self, row, **self.tile_options) if grows else plain(self, row) for row in rows]
        return torch.cat(found).unflatten(0, hidden.shape[:-1])

    # Keep the class name: transformers writes it to config.json and uses it to find modules that must not be split.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
