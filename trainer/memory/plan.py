"""All memory choices of a run, decided."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.engine.window import Cut, at_epoch, decide_cut
from trainer.errors import RecipeError
from trainer.recipe import Memory, Precision, Recipe, Strategy


@dataclass(frozen=True)
class Plan:
    """What was decided from a recipe's wishes, for a number of ranks.

    Args:
        strategy: single, ddp or fsdp.
        precision: of weights and arithmetic.
        world_size: ranks, over all nodes.
        first_cut: how the batches of epoch 0 are cut.
    """

    strategy: Strategy
    precision: Precision
    world_size: int
    first_cut: Cut

    def describe(self) -> str:
        """The plan in one line, for a person."""
        cut = self.first_cut
        tokens = f" of at most {cut.micro_batch_tokens} tokens" if cut.micro_batch_tokens else ""
        return (
            f"batch {cut.batch_size} = {_count(self.world_size, 'rank', 's')} × "
            f"{_count(cut.accumulate, 'micro-batch', 'es')} of {cut.micro_batch_size}{tokens}, "
            f"{self.strategy}, {self.precision}"
        )


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def decide_plan(recipe: Recipe, world_size: int) -> Plan:
    """Decide everything that the recipe left open.

    Raises:
        RecipeError: when the wishes contradict each other or cannot work together.
    """
    if isinstance(recipe.accumulate, dict):
        for epoch in recipe.accumulate:
            cut_at(recipe, world_size, epoch)  # what contradicts itself in a later epoch is refused now
    strategy = decide_strategy(recipe.memory, world_size)
    return Plan(strategy, recipe.memory.precision, world_size, cut_at(recipe, world_size, 0))


def decide_strategy(memory: Memory, world_size: int) -> Strategy:
    """``auto`` is single on one rank and ddp on several."""
    if memory.strategy == "fsdp":
        raise RecipeError("memory.strategy=fsdp is not built yet: use ddp, single or auto")
    if memory.strategy == "single" and world_size > 1:
        raise RecipeError(f"memory.strategy=single cannot use {world_size} ranks: use ddp or auto, or run.devices 1")
    if memory.strategy == "auto":
        return "ddp" if world_size > 1 else "single"
    return memory.strategy


def cut_at(recipe: Recipe, world_size: int, epoch: int) -> Cut:
    """How the batches of ``epoch`` are cut."""
    memory = recipe.memory
    micro_batch_size = None if memory.micro_batch_size == "auto" else memory.micro_batch_size
    accumulate = at_epoch(recipe.accumulate, epoch)
    return decide_cut(recipe.batch_size, micro_batch_size, accumulate, world_size, memory.micro_batch_tokens)
