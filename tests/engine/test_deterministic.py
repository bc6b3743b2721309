"""run.deterministic: the same bits on 1, 2 and 4 ranks, replicated or sharded, and what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from matrix import ADAMW, Case, set_up
from matrix import plain_run as plain_steps
from problems import Branch, TwoLosses
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.contract import Data
from trainer.engine.algorithms import deterministic_algorithms
from trainer.engine.deterministic import tree_sync
from trainer.engine.reproducible_norm import reproducible_norm
from trainer.engine.tree import PartialSums, tree_sum
from trainer.engine.window import Cut, Windows, cut_batch
from trainer.errors import RecipeError
from trainer.memory.plan import decide_plan, idle_ranks
from trainer.models import MLP
from trainer.recipe import Memory, Optim, Recipe, Run

WAYS = [("single", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4)]


@dataclass(frozen=True)
class EvenCase(Case):
    """A case of ``matrix`` with ``run.deterministic``, for more steps than an epoch has."""

    steps: int = 5

    @property
    def recipe(self) -> Recipe:
        run = Run(deterministic=True)
        memory = dataclasses.replace(self.memory, strategy="auto") if self.world_size == 1 else self.memory
        if self.memory.strategy == "fsdp":
            memory = self.memory
        return super().recipe.replace(run=run, memory=memory)


def train(case: EvenCase) -> dict[str, Any]:
    """The hash of all weights, of the optimizer's state, and the figures of every step."""
    with deterministic_algorithms(True):
        fabric, stepper, windows, stack = set_up(case, decide_plan(case.recipe, case.world_size))
        assert fabric.world_size == case.world_size
        per_epoch = -(-case.size // case.batch_size)
        results = []
        for number in range(case.steps):
            epoch, step = divmod(number, per_epoch)
            (window,) = windows.epoch(epoch, step, step + 1)
            results.append(stepper.step(window))
        parameters = dict(stack.module.named_parameters())
        state = {
            f"{name}.{key}": value
            for name, parameter in parameters.items()
            for key, value in stepper.optimizer.state[parameter].items()
        }
        return {
            "weights": digest(parameters),
            "state": digest(state),
            "figures": struct.pack(f"<{2 * case.steps}d", *(x for r in results for x in (r.loss, r.grad_norm))),
            "losses": [result.loss for result in results],
            "skipped": [result.skipped for result in results],
        }


def digest(tensors: dict[str, Tensor]) -> str:
    """The hash of every bit of them, put together where they are sharded."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        whole.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def answers(case: EvenCase, ranks: Any, ways: list[tuple[str, int]] = WAYS) -> dict[tuple[str, int], dict[str, Any]]:
    """The answer of every way to train, the same on all of its ranks."""
    found = {}
    for strategy, world_size in ways:
        memory = dataclasses.replace(case.memory, strategy=strategy)
        own = dataclasses.replace(case, world_size=world_size, memory=memory)
        replies = [train(own)] if world_size == 1 else ranks(world_size).run(train, own)
        assert all(reply == replies[0] for reply in replies)
        found[strategy, world_size] = replies[0]
    return found


def check(case: EvenCase, ranks: Any, ways: list[tuple[str, int]] = WAYS) -> dict[str, Any]:
    """All ways must come to the same bits; returns them."""
    found = answers(case, ranks, ways)
    first = found[ways[0]]
    different = {way: [key for key in first if answer[key] != first[key]] for way, answer in found.items()}
    assert not any(different.values()), {way: keys for way, keys in different.items() if keys}
    assert not any(first["skipped"])
    return first


@pytest.mark.parametrize("name", ["vit", "distilbert", "mlp"])
def test_the_same_bits_on_1_2_and_4_ranks_replicated_and_sharded(name, ranks):
    # Batches of 8, 8 and 3 samples; of 3 micro-batches and of 1: neither fills 2 or 4 ranks.
    case = EvenCase(name, Memory(micro_batch_size=3), dropout=0.2, optim=dataclasses.replace(ADAMW, clip_norm=0.1))
    check(case, ranks)
