"""What the checks look at: the recipe with its data, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from trainer.launching.world import World
from trainer.memory.plan import Plan, decide_plan
from trainer.memory.precision import weights_dtype
from trainer.planner.knobs import wants_plan
from trainer.recipe import Recipe
from trainer.weights.streaming import on_meta

STATE_TENSORS = {"adamw": 2, "adam": 2, "rmsprop": 1, "adagrad": 1, "lion": 1}
"""Tensors of a weight's size that an optimizer keeps of it; those of sgd depend on its momentum."""


@dataclass
class Subject:
    """A recipe to be examined.

    Args:
        recipe: with its data prepared and its model filled from it, once ``ready``.
        source: what names the recipe.
        world: the ranks that were asked for.
        ready: whether model and data could be prepared.
    """

    recipe: Recipe
    source: str
    world: World
    ready: bool = False

    @property
    def run_dir(self) -> Path:
        """Where the run would write; without ``run.dir``, where it would make its directory."""
        wanted = self.recipe.run.dir
        return Path(wanted).absolute() if wanted else Path(f"runs/{Path(self.source).stem}").absolute()

    @cached_property
    def disk(self) -> Path:
        """The run directory, or the nearest folder above it that is there."""
        return next(path for path in (self.run_dir, *self.run_dir.parents) if path.is_dir())

    @cached_property
    def module(self) -> nn.Module:
        """The model, without memory for its weights; only when ``ready``."""
        return on_meta(self.recipe.model.unloaded().build)

    @cached_property
    def plan(self) -> Plan | None:
        """How the run would use memory; ``None`` where the planner is still to decide that."""
        return None if wants_plan(self.recipe) else decide_plan(self.recipe, self.world.size)

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Of one checkpoint: weights, buffers and the optimizer's state."""
        optim, memory = self.recipe.optim, self.recipe.memory
        dtype = weights_dtype(memory)
        tensors = STATE_TENSORS.get(optim.name, 0) + (optim.name in ("sgd", "rmsprop") and optim.momentum > 0)
        total = sum(buffer.nbytes for buffer in self.module.buffers())
        for parameter in self.module.parameters():
            width = parameter.element_size() if dtype is None else dtype.itemsize
            state = tensors * width * memory.optimizer_state_bits / 32 if parameter.requires_grad else 0
            total += int(parameter.numel() * (width + state))
        return total
