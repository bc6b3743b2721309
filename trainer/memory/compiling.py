"""``memory.compile``: ``torch.compile``, block by block or the model as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trainer.recipe import Compile


def compile_module(module: nn.Module, blocks: Sequence[nn.Module], wish: Compile) -> None:
    """Compile in place, so that no parameter is renamed; happens at the first forward.

    Blocks share one compiled graph as they have the same code: compiling takes as long for 24 of them as for one.
    Dropout draws its masks from the generators that eager torch draws from, in the same order.
    """
    if wish == "none":
        return
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # else the compiler's own random numbers, which no seed of ours replays
    for target in blocks if wish == "blocks" else [module]:
        target.compile()
