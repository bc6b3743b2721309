"""A lower bound for the memory of a plan, from its weights alone: what exceeds it needs no trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.memory.knobs import ADAM, HALF_TRUE
from trainer.memory.plan import Plan
from trainer.memory.sharding import AMP_DTYPES, large_embeddings, without_shared_parameters
from trainer.planner.traced_run import empty_module
from trainer.recipe import Recipe
from trainer.weights.blocks import find_blocks
from trainer.weights.nf4 import WeightCounts, count_weights


class WeightBytes(NamedTuple):
    """Bytes of the weights of a module."""

    every: int  # all weights
    trained: int  # trained weights of its blocks that all get dense gradients
    gathered: int  # the largest block and all that is in no block, which FSDP gathers together


class ModelSize(NamedTuple):
    """The weights of a model: their number, and their bytes in full and in half precision."""

    counts: WeightCounts
    full: WeightBytes
    half: WeightBytes


def measure(recipe: Recipe) -> ModelSize:
    """Count the weights of the model of ``recipe``, which is built on meta."""
    module = empty_module(recipe)
    blocks = find_blocks(module, recipe.model.blocks)
    alone = [*without_shared_parameters(module, blocks), *large_embeddings(module, blocks)]
    return ModelSize(count_weights(module), *(weight_bytes(module, alone, half) for half in (False, True)))


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


def lower_bound(size: ModelSize, plan: Plan, recipe: Recipe) -> dict[str, int]:
    """Return the bytes, by purpose, that a rank needs at the same time with every cut of the batch."""
    memory, copies, streamed = plan.memory, plan.memory.tensor_parallel, plan.memory.cpu_offload == "parameters"
    casts, sharded = memory.precision in AMP_DTYPES, plan.strategy == "fsdp"
    own = size.half if casts and (memory.cpu_offload == "optimizer" or memory.precision in HALF_TRUE) else size.full
    shards = plan.world_size // memory.replicas if sharded else copies
    found = {"weights": 0 if streamed else own.every // shards}
    if sharded and (streamed or shards > copies):
        found["weights of a block and outside blocks"] = (size.half if casts else size.full).gathered // copies
    elif memory.cpu_offload == "none" and not memory.optimizer_in_backward:
        found["gradients"] = own.trained // shards
    tensors = 2 if recipe.optim.name in ADAM else int(recipe.optim.name == "muon")
    if memory.cpu_offload == "none" and tensors:
        found["optimizer state"] = int(tensors * memory.optimizer_state_bits / 32 * own.trained) // shards
    return {name: count for name, count in found.items() if count}
