"""``memory.activation_checkpointing``: keep fewer activations of a block, and recompute the rest in backward.

Uses the non-reentrant ``torch.utils.checkpoint``, which restores the random generators, so dropout draws the same
masks. BatchNorm statistics change in the first pass only. A decoder's cache, which both passes would append to, is
switched off or rejected. Only ``forward`` is replaced: parameters keep their names, and FSDP's hooks run around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.errors import RecipeError
from trainer.memory.compatibility import require_first_order
from trainer.weights.blocks import disable_kv_cache

aten = torch.ops.aten
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_EXPENSIVE = ("mm", "addmm", "bmm", "baddbmm", "convolution", *(f"_scaled_dot_product_{name}" for name in _ATTENTION))
KEPT = {getattr(aten, name).default for name in _EXPENSIVE if hasattr(aten, name)}  # some builds lack some
"""Operations that ``selective`` does not recompute: those that cost the most time for the memory of their output."""
KEPT_BY_NAME = {"trainer::block_sparse_attention", "flex_attention"}  # operations that are registered at first use


def checkpoint_blocks(module: nn.Module, blocks: Sequence[nn.Module], mode: str | float) -> None:
    """Checkpoint ``blocks`` of ``module``, without its cache of keys and values.

    ``mode`` is none, selective, full, or the fraction of the blocks to checkpoint fully, spread evenly."""
    if mode == "none":
        return
    disable_kv_cache(module)
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_expensive)
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:  # torch 2.15, not 2.11
            options["respect_saved_tensors_hooks"] = True  # kept activations can be offloaded as well
    count = len(blocks) if isinstance(mode, str) else round(mode * len(blocks))
    for at, block in enumerate(blocks):
        if (at + 1) * count // len(blocks) > at * count // len(blocks):
            layers = [layer for layer in block.modules() if isinstance(layer, _BatchNorm)]
            block.forward = _checkpointed(type(block).__name__, block.forward, layers, options)


def keep_expensive(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide for ``selective`` whether to keep the output of an operation.

    Attention with dropout is recomputed: if kept, later dropout would draw different masks in the second pass.
    """
    keep = (operation in KEPT and not _dropout(operation, args, kwargs)) or operation.name() in KEPT_BY_NAME
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _dropout(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            return args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
    return 0.0


def _checkpointed(
    name: str, forward: Callable[..., Any], layers: list[_BatchNorm], options: dict[str, Any]
) -> Callable[..., Any]:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # evaluation keeps no activations
            return forward(*args, **kwargs)
        if any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values())):  # caches of transformers
            raise RecipeError(
                f"memory.activation_checkpointing computes {name} twice, which would append twice to its cache of keys "
                "and values: call the model with use_cache=False and no past_key_values, or use none"
            )
        counted = layers and not torch.compiler.is_compiling()  # compiled code repeats no side effects
        output = checkpoint(_counting_once(forward, layers) if counted else forward, *args, **options, **kwargs)
        if "context_fn" in options:  # the first backward releases what is kept
            require_first_order(output, "memory.activation_checkpointing=selective", "use full")
        return output

    return checkpointed


def _counting_once(forward: Callable[..., Any], layers: list[_BatchNorm]) -> Callable[..., Any]:
    """Wrap ``forward`` so that only the first call updates the running statistics of ``layers``."""
    seen = False

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if not seen:
            seen = True
            return forward(*args, **kwargs)
        before = [(layer, layer.momentum, layer.num_batches_tracked) for layer in layers]
        for layer in layers:
            layer.momentum, layer.num_batches_tracked = 0.0, None
        try:  # the second pass ends early with an exception, when backward has all it needs
            return forward(*args, **kwargs)
        finally:
            for layer, momentum, count in before:
                layer.momentum, layer.num_batches_tracked = momentum, count

    return counting
