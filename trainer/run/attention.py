"""Record which attention kernels a model runs."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

KERNELS = re.compile(r"ScaledDotProduct(\w+?)Attention(?:ForCpu)?Backward|SafeSoftmaxBackward|(Liger\w+)Function")
"""Autograd's names for the backward of torch's attention kernels, of the math kernel's softmax, and of Liger."""


def record_attention_kernels(module: nn.Module) -> list[str]:
    """Return a list that the first forward with gradients fills: the attention and Liger kernels of its backward.
    Compiled kernels are not visible."""
    found: list[str] = []

    def look(_: nn.Module, __: Any, output: Any) -> None:
        starts = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        if not starts:
            return
        handle.remove()
        left, seen = starts, set(starts)
        while left:
            node = left.pop()
            if kind := KERNELS.match(node.name()):
                found.append(kind[2] or (kind[1] or "math").lower())
            new = {after for after, _ in node.next_functions if after is not None} - seen
            seen |= new
            left += new
        found[:] = sorted(set(found))

    handle = module.register_forward_hook(look)
    return found
