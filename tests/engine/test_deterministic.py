"""run.deterministic: the same bits on 1, 2 and 4 ranks, replicated or sharded, and what it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import tee
from typing import Any

import pytest
import torch
from helpers.matrix import ADAMW, Case, set_up
from helpers.matrix import plain_run as plain_steps
from helpers.problems import Branch, BranchOnly, TwoLosses, make_model, make_samples
from helpers.problems import Problem as Samples
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.contract import Data, Model
from trainer.engine.deterministic import CUBLAS, deterministic_algorithms, make_tree_sync
from trainer.engine.quarantine import Quarantine
from trainer.engine.window import Window, Windows
from trainer.errors import RecipeError, RunError
from trainer.memory.plan import decide_plan
from trainer.models import MLP
from trainer.recipe import Memory, Optim, Recipe, Run
from trainer.run.description import idle_ranks
from trainer.values import BadSample, PartialBatch, Request

WAYS = [("single", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2), ("ddp", 4), ("fsdp", 4)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have: kernels that share their work out to more threads add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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

    def observe(self, windows: Windows) -> None:
        """Look at the windows, or change them."""


class PoisonedCase(EvenCase):
    """One of the samples is not a number."""

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        samples = super().samples
        samples[5]["pixel_values"] = samples[5]["pixel_values"] * torch.nan
        return samples


SPOILT = (2, 7, 11)


class SpoiltCase(EvenCase):
    """Three of the samples cannot be loaded."""

    def observe(self, windows: Windows) -> None:
        fetch = windows.fetch

        def spoilt(requests: Iterator[Request]) -> Iterator[Any]:
            ours, theirs = tee(requests)
            for (indices, *_), batch in zip(ours, fetch(theirs), strict=True):
                bad = [BadSample(index, f"sample {index}", "spoilt") for index in indices if index in SPOILT]
                yield PartialBatch(batch, [index for index in indices if index not in SPOILT], bad) if bad else batch

        windows.fetch, windows.quarantine = spoilt, Quarantine(limit=3)


def train(case: EvenCase) -> dict[str, Any]:
    """The hash of all weights, of the optimizer's state, and the figures of every step."""
    with deterministic_algorithms(case.deterministic):
        fabric, stepper, windows, stack = set_up(case, decide_plan(case.recipe, case.world_size))
        assert fabric.world_size == case.world_size
        case.observe(windows)
        per_epoch = -(-case.size // case.batch_size)
        results = []
        for number in range(case.steps):
            epoch, step = divmod(number, per_epoch)
            (window,) = windows.epoch(epoch, step, step + 1)
            results.append(stepper.step(window))
        parameters = dict(stack.module.named_parameters())
        states = {name: stepper.optimizer.state[parameter] for name, parameter in parameters.items()}
        return {
            "weights": digest(parameters),
            "state": digest({f"{name}.{key}": state[key] for name, state in states.items() for key in state}),
            "losses": [result.loss.hex() for result in results],
            "norms": [result.grad_norm.hex() for result in results],
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


def decimal(answer: dict[str, Any]) -> list[float]:
    """Its losses, as numbers."""
    return [float.fromhex(loss) for loss in answer["losses"]]


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

MUON = Optim("muon", lr=1e-2, weight_decay=0.1, clip_norm=0.1)

ON_2 = [("single", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.mark.slow
def test_the_same_bits_on_1_and_2_ranks_replicated_and_sharded(ranks):
    # Two epochs of batches of 8, 8 and 3 samples: 3 micro-batches or 1, which do not fill 2 ranks.
    case = CASES["vit"]
    ours = check(case, ranks, ON_2)
    assert decimal(ours)[:3] == pytest.approx(plain_steps(case)["losses"], rel=1e-6)


def test_the_same_bits_of_many_micro_steps(ranks):
    # 8 micro-batches a batch: partial sums of 1, 2 and 4 micro-steps.
    check(EvenCase("mlp", Memory(micro_batch_size=1), dropout=0.2, optim=HARD, steps=4), ranks, ON_2)


def test_the_same_bits_of_orthogonalized_matrices(ranks):
    check(dataclasses.replace(CASES["muon"], steps=3), ranks, ON_2)


CASES = {
    "vit": EvenCase("vit", Memory(micro_batch_size=3), dropout=0.2, optim=HARD),
    "bigbird": EvenCase("bigbird", Memory(micro_batch_size=2), dropout=0.2, optim=HARD),
    "no clipping": EvenCase("vit", Memory(micro_batch_size=2), optim=dataclasses.replace(ADAMW, clip_norm=None)),
    "cut by tokens": EvenCase("distilbert", Memory(micro_batch_size=4, micro_batch_tokens=64), dropout=0.2, optim=HARD),
    "fp64": EvenCase("vit", Memory(micro_batch_size=3, precision="64-true"), dropout=0.2, optim=HARD),
    "checkpointing": EvenCase("vit", Memory(micro_batch_size=3, activation_checkpointing="full"), dropout=0.2),
    "fewer micro-batches than ranks": EvenCase("vit", Memory(micro_batch_size=8), size=11, dropout=0.2),
    "frozen": EvenCase("frozen vit", Memory(micro_batch_size=3), dropout=0.2, optim=HARD),
    "muon": EvenCase("vit", Memory(micro_batch_size=3), dropout=0.2, optim=MUON),
    "lion": EvenCase("vit", Memory(micro_batch_size=3), optim=Optim("lion", lr=1e-3, weight_decay=0.1, clip_norm=1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", CASES)
def test_the_same_bits_on_1_2_and_4_ranks_whatever_is_trained(which, ranks):
    check(CASES[which], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ways", [[("single", 1), ("ddp", 2), ("ddp", 4)], [("fsdp", 1), ("fsdp", 2), ("fsdp", 4)]])
def test_the_same_bits_in_mixed_precision_by_the_same_way(ways, ranks):
    # FSDP casts weights where autocast casts operations, so that the two differ from each other.
    check(EvenCase("vit", Memory(micro_batch_size=3, precision="bf16-mixed"), dropout=0.2, optim=HARD), ranks, ways)


@pytest.mark.slow
def test_the_same_bits_with_offloaded_parameters(ranks):
    plain = check(CASES["no clipping"], ranks, [("single", 1)])
    memory = Memory(micro_batch_size=2, cpu_offload="parameters")
    offloaded = check(dataclasses.replace(CASES["no clipping"], memory=memory), ranks, WAYS[1::2])
    assert offloaded == plain


@pytest.mark.slow
def test_several_losses_and_parameters_that_none_reaches(ranks):
    check(EvenCase("two_losses", Memory(micro_batch_size=2), optim=HARD), ranks, WAYS[:3:2])


def test_a_step_that_is_not_finite_is_skipped_on_any_number_of_ranks(ranks):
    found = answers(PoisonedCase("mlp", Memory(micro_batch_size=1), steps=3), ranks, ON_2[:2])
    assert found["single", 1] == found["ddp", 2]
    assert found["single", 1]["skipped"].count(True) == 1


def test_samples_that_cannot_be_loaded_are_left_out_on_any_number_of_ranks(ranks):
    # Micro-batches of one sample: those of a bad one are found to be empty when they are loaded, in any place.
    found = answers(SpoiltCase("mlp", Memory(micro_batch_size=1), optim=HARD, steps=6), ranks, ON_2)
    assert found["single", 1] == found["ddp", 2] == found["fsdp", 2]
    whole = answers(EvenCase("mlp", Memory(micro_batch_size=1), optim=HARD, steps=6), ranks, ON_2[:1])
    assert found["single", 1]["losses"] != whole["single", 1]["losses"]


def test_without_it_the_bits_differ(ranks):
    found = answers(EvenCase("mlp", Memory(micro_batch_size=1), optim=HARD, deterministic=False), ranks, ON_2[:2])
    assert found["single", 1]["weights"] != found["ddp", 2]["weights"]
    assert decimal(found["single", 1]) == pytest.approx(decimal(found["ddp", 2]), rel=1e-6)


# -------------------------------------------------------------------------------------- what is refused, what is said


def recipe(settings: dict[str, Any], **memory: Any) -> Recipe:
    fields = {"model": MLP(num_classes=3), "data": Data(), "batch_size": 8, "run": Run(deterministic=True)}
    return Recipe(**fields | settings, memory=Memory(**{"micro_batch_size": 2} | memory))


@pytest.mark.parametrize(
    ("ranks", "message", "settings", "memory"),
    [
        (3, "there are 3: use a power of two", {}, {}),
        (2, "set memory.micro_batch_size to a number", {}, {"micro_batch_size": "auto"}),
        (2, "set batch_size instead of accumulate", {"batch_size": None, "accumulate": 2}, {}),
        (2, "memory.precision=16-mixed", {}, {"precision": "16-mixed"}),
        (2, "memory.precision=bf16-true", {}, {"precision": "bf16-true"}),
        (1, "memory.compile=blocks", {}, {"compile": "blocks"}),
        (1, "memory.cpu_offload=optimizer", {}, {"cpu_offload": "optimizer"}),
        (4, "memory.replicas=2", {}, {"strategy": "fsdp", "replicas": 2}),
        (1, "memory.optimizer_in_backward", {}, {"micro_batch_size": 8, "optimizer_in_backward": True}),
        (1, "memory.optimizer_state_bits", {}, {"optimizer_state_bits": 8}),
        (2, "leave memory.sync_every_micro_step at null", {}, {"strategy": "fsdp", "sync_every_micro_step": False}),
        (2, "cannot train Branch", {"model": Branch()}, {}),
        (2, "cannot train TwoLosses", {"model": TwoLosses()}, {"strategy": "fsdp"}),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_that_names_the_key(ranks, message, settings, memory):
    with pytest.raises(RecipeError, match=r"^run\.deterministic=true[^\n]*" + message):
        decide_plan(recipe(settings, **memory), ranks)


def test_running_statistics_are_refused():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(RecipeError, match=r"run\.deterministic=true: the model has BatchNorm"):
        make_tree_sync(module, list(module.parameters()), 2)
    module[1] = nn.BatchNorm1d(2, track_running_stats=False)
    assert make_tree_sync(module, list(module.parameters()), 1).world_size == 1


def test_a_micro_batch_that_leaves_out_parameters_ends_the_run():
    module = BranchOnly()
    sync = make_tree_sync(module, list(module.parameters()), 1)
    sync.begin(Window([], {}, samples=2, sizes=[1, 1]))
    sync.before_forward(is_last=False)
    module(torch.ones(1, 48), both=True).sum().backward()
    sync.before_forward(is_last=True)
    module(torch.ones(1, 48), both=False).sum().backward()
    with pytest.raises(RunError, match="produced gradients for different parameters than the first"):
        sync.after_last_backward()


def test_the_plan_says_so_and_counts_micro_steps_by_rank():
    plan = decide_plan(recipe({}, micro_batch_size=4), 2)
    assert plan.describe().endswith("ddp, 32-true, the same bits on any number of ranks")
    assert (plan.initial_cut.micro_batch_size, plan.initial_cut.accumulate) == (4, 1)
    assert decide_plan(recipe({}, micro_batch_size=4, strategy="fsdp"), 2).memory.sync_every_micro_step is True


def test_idle_ranks_are_spoken_of():
    cuts = ((4, 2), (4, 4), (1, 16))
    fits, waits, wide = (idle_ranks(decide_plan(recipe({}, micro_batch_size=size), n)) for size, n in cuts)
    assert fits is None
    assert "2 of 4 ranks are idle in the last micro-step: use a smaller" in waits
    assert "use fewer ranks" in wide


def test_torch_is_left_as_it_was_and_names_what_has_no_deterministic_version(monkeypatch):
    monkeypatch.delenv(CUBLAS, raising=False)
    seen = []
    refused = pytest.raises(RecipeError, match=r"run\.deterministic=true: put_ has no deterministic implementation")
    with refused, deterministic_algorithms(True):
        seen += [torch.are_deterministic_algorithms_enabled(), os.environ[CUBLAS]]
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
    assert seen == [True, ":4096:8"]
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert CUBLAS not in os.environ
    with pytest.raises(RuntimeError, match="something else"), deterministic_algorithms(True):
        raise RuntimeError("something else")
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
