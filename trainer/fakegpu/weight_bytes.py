"""Bytes of a module's weights, also on meta: what no plan can do without, before anything is traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class WeightBytes(NamedTuple):
    """Bytes of the weights of a module."""

    every: int  # all weights
    trained: int  # trained weights of its blocks that all get dense gradients
    gathered: int  # the largest block and all that is in no block, which FSDP gathers together


def weight_bytes(module: nn.Module, blocks: Sequence[nn.Module], half: bool) -> WeightBytes:
    """Count the bytes of ``module``; with ``half``, floating-point weights have 2 bytes at most.

    What may get no gradient, or a sparse one, does not count as trained: lists of modules, such as experts, embeddings
    and the largest block, because a model may not use its last one. FSDP gathers BatchNorm and inner blocks separately.
    """

    def total(parameters: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * min(p.itemsize, 2 if half and p.is_floating_point() else 8) for p in parameters)

    def without(whole: nn.Module, *kinds: type[nn.Module]) -> set[nn.Parameter]:
        apart = [part for part in whole.modules() if part is not whole and (isinstance(part, kinds) or part in units)]
        return {*whole.parameters()}.difference(*(part.parameters() for part in apart))

    units = {*blocks}
    certain = [without(block, nn.ModuleList, nn.ModuleDict, nn.Embedding, nn.EmbeddingBag) for block in blocks]
    trained = sorted(total(p for p in parameters if p.requires_grad) for parameters in certain)
    largest = max((total(without(block, _BatchNorm, nn.Embedding)) for block in blocks), default=0)
    return WeightBytes(total(module.parameters()), sum(trained[:-1]), largest + total(without(module, _BatchNorm)))
