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
from problems import Branch, TwoLosses, make_model, make_samples
from problems import Problem as Samples
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.contract import Data, Model
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
    deterministic: bool = True

    @property
    def recipe(self) -> Recipe:
        return super().recipe.replace(run=Run(deterministic=self.deterministic))

    @property
    def model(self) -> Model:
        name = self.name.removeprefix("frozen ")
        if name == "two_losses":
            return TwoLosses()
        model = dataclasses.replace(make_model(name), dropout=self.dropout)
        if name == "mlp":
            model.blocks = (nn.Linear,)
        return model if name == self.name else dataclasses.replace(model, train_last_blocks=1)

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        return make_samples(Samples(self.name.removeprefix("frozen "), self.size, self.batch_size, 1))


class PoisonedCase(EvenCase):
    """One of the samples is not a number."""

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        samples = super().samples
        samples[5]["pixel_values"] = samples[5]["pixel_values"] * torch.nan
        return samples


def train(case: EvenCase) -> dict[str, Any]:
    """The hash of all weights, of the optimizer's state, and the figures of every step."""
    with deterministic_algorithms(case.deterministic):
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


HARD = dataclasses.replace(ADAMW, clip_norm=0.1)
"""Clipped in every step."""

ON_2 = [("single", 1), ("ddp", 2), ("fsdp", 2)]


def test_the_same_bits_on_1_2_and_4_ranks_replicated_and_sharded(ranks):
    # Two epochs of batches of 8, 8 and 3 samples: 3 micro-batches or 1, which fill neither 2 nor 4 ranks.
    check(EvenCase("vit", Memory(micro_batch_size=3), dropout=0.2, optim=HARD), ranks)


@pytest.mark.parametrize("name", ["distilbert", "mlp"])
def test_the_same_bits_on_1_and_2_ranks(name, ranks):
    # Texts are cut by length. 8 micro-batches a batch: partial sums of 1, 2 and 4 micro-steps.
    case = EvenCase(name, Memory(micro_batch_size=1), dropout=0.2, optim=HARD, steps=4)
    ours = check(case, ranks, ON_2)
    if name == "distilbert":  # the matrix has a plain loop for models that have one input
        assert ours["losses"][:3] == pytest.approx(plain_steps(case)["losses"], rel=1e-6)


SLOW_CASES = {
    "distilbert": EvenCase("distilbert", Memory(micro_batch_size=3), dropout=0.2, optim=HARD),
    "mlp": EvenCase("mlp", Memory(micro_batch_size=3), dropout=0.2, optim=HARD),
    "bigbird": EvenCase("bigbird", Memory(micro_batch_size=2), dropout=0.2, optim=HARD),
    "one sample a micro-batch": EvenCase("vit", Memory(micro_batch_size=1), dropout=0.2, optim=HARD),
    "no clipping": EvenCase("vit", Memory(micro_batch_size=2), optim=dataclasses.replace(ADAMW, clip_norm=None)),
    "cut by tokens": EvenCase("distilbert", Memory(micro_batch_size=4, micro_batch_tokens=64), dropout=0.2),
    "fp64": EvenCase("vit", Memory(micro_batch_size=3, precision="64-true"), dropout=0.2, optim=HARD),
    "checkpointing": EvenCase("vit", Memory(micro_batch_size=3, activation_checkpointing="full"), dropout=0.2),
    "fewer micro-batches than ranks": EvenCase("vit", Memory(micro_batch_size=8), size=11, dropout=0.2),
    "frozen": EvenCase("frozen vit", Memory(micro_batch_size=3), dropout=0.2, optim=HARD),
    **{
        name: EvenCase("vit", Memory(micro_batch_size=3), optim=Optim(name, lr=1e-3, weight_decay=0.1, clip_norm=1.0))
        for name in ("sgd", "adam", "adagrad", "rmsprop", "lion")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("which", SLOW_CASES)
def test_the_same_bits_whatever_is_trained(which, ranks):
    check(SLOW_CASES[which], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [[("single", 1), ("ddp", 2), ("ddp", 4)], [("fsdp", 1), ("fsdp", 2), ("fsdp", 4)]])
def test_the_same_bits_in_mixed_precision_by_the_same_way(ways, ranks):
    # FSDP casts weights where autocast casts operations, so that the two differ from each other.
    check(EvenCase("vit", Memory(micro_batch_size=3, precision="bf16-mixed"), dropout=0.2, optim=HARD), ranks, ways)


@pytest.mark.slow
def test_the_same_bits_with_offloaded_parameters(ranks):
    plain = check(SLOW_CASES["no clipping"], ranks, [("single", 1)])
    memory = Memory(micro_batch_size=2, cpu_offload="parameters")
    offloaded = check(dataclasses.replace(SLOW_CASES["no clipping"], memory=memory), ranks, WAYS[1::2])
    assert offloaded == plain


@pytest.mark.slow
def test_several_losses_and_parameters_that_none_reaches(ranks):
    check(
        EvenCase("two_losses", Memory(micro_batch_size=2), optim=HARD), ranks, [("single", 1), ("ddp", 2), ("ddp", 4)]
    )


def test_a_step_that_is_not_finite_is_skipped_on_any_number_of_ranks(ranks):
    case = PoisonedCase("mlp", Memory(micro_batch_size=1), steps=3)
    found = answers(case, ranks, [("single", 1), ("ddp", 2)])
    assert found["single", 1] == found["ddp", 2]
    assert found["single", 1]["skipped"].count(True) == 1


def test_without_it_the_bits_differ(ranks):
    case = EvenCase("mlp", Memory(micro_batch_size=1), optim=HARD, deterministic=False)
    found = answers(case, ranks, [("single", 1), ("ddp", 2)])
    assert found["single", 1]["weights"] != found["ddp", 2]["weights"]
    assert found["single", 1]["losses"] == pytest.approx(found["ddp", 2]["losses"], rel=1e-6)
