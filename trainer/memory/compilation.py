"""``memory.compile``: compile blocks or the whole model with torch.compile, optionally into CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def compile_module(module: nn.Module, blocks: Sequence[nn.Module], mode: str) -> None:
    """Compile ``blocks``, or all of ``module`` for the ``mode`` model, in place at their first forward.

    Parameters keep their names. Blocks with the same code share one compiled graph. A second sequence length or number
    of samples triggers one compilation for all sizes. With ``cuda_graphs``, only code for a single shape becomes a CUDA
    graph, because each shape would need its own. Dropout draws the same masks as in eager mode.
    """
    if mode == "none":
        return
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # the compiler's own random numbers would not follow the seeds of the run
    inductor.triton.cudagraph_skip_dynamic_graphs = True
    for part in [module] if mode == "model" else blocks:
        part.compile(mode="reduce-overhead" if mode == "cuda_graphs" else None)
    if mode == "cuda_graphs":  # a forward over all blocks, with its backward, is one step for CUDA graphs
        module.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
        keep_gradients(module)


def keep_gradients(module: nn.Module) -> None:
    """Accumulate the gradients of ``module`` in separate memory that is allocated once.

    Autograd would keep the first gradient in a CUDA graph's memory pool, which the next replay overwrites.
    """
    kept: dict[int, Tensor] = {}  # by id: a hook that referred to its parameter would keep both alive

    def leave_pool(parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and gradient is not kept.get(id(parameter)):
            own = kept[id(parameter)] if id(parameter) in kept else torch.empty_like(gradient)
            kept[id(parameter)] = parameter.grad = own.copy_(gradient)

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(leave_pool)
