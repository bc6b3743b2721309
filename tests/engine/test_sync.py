"""Gradients that are reduced after the last backward share their collectives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import matrix
from helpers.collectives import Noted, reductions, watched
from helpers.problems import Problem, engine_run
from torch import Tensor, nn

from trainer.contract import Model
from trainer.engine import sync
from trainer.memory.plan import decide_plan
from trainer.recipe import Memory, Optim
from trainer.values import Loss


def collectives_of(problem: Problem) -> list[int]:
    """How many collectives follow the last backward of each step, on two ranks."""
    found = []

    def prepare(stepper: Any, windows: Any) -> None:
        accumulate = stepper.accumulate

        def counted(window: Any) -> Any:
            with Noted() as noted, pytest.MonkeyPatch.context() as patch:
                patch.setattr(stepper.precision, "backward", watched(stepper, noted))
                totals = accumulate(window)
            found.append(len(reductions(noted.events)[1]))
            return totals

        stepper.accumulate = counted

    engine_run(problem, 2, prepare)
    return found


@pytest.mark.parametrize("name", ["two_losses", "branch"])
def test_a_model_of_several_losses_or_branches_sends_its_gradients_together(name, ranks):
    for counts in ranks(2).run(collectives_of, Problem(name, 12, 6, 3)):
        assert counts == [2, 2, 2]  # which parameters each rank has reached, and the gradients


def mixed(rank: int) -> list[Tensor]:
    """Of several types, one transposed, one sparse, one empty."""
    generator = torch.Generator().manual_seed(rank)
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank, 2]]), torch.randn(2, 4, generator=generator), (5, 4), check_invariants=True
    )
    types = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float32, torch.bfloat16)
    dense = [torch.randn(3, 4, generator=generator).to(dtype) for dtype in types]
    return [*dense, dense[0].clone().t(), torch.zeros(0), torch.tensor(rank + 0.5), sparse]


def means() -> tuple[list[Tensor], list[str]]:
    tensors = mixed(torch.distributed.get_rank())
    with Noted() as noted:
        sync.begin_mean(tensors)()
    return [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors], noted.events


def test_the_mean_of_tensors_of_any_kind(ranks):
    dense = ([tensor.to_dense() if tensor.is_sparse else tensor for tensor in mixed(rank)] for rank in range(2))
    wanted = [(first + second) / 2 for first, second in zip(*dense, strict=True)]
    for found, events in ranks(2).run(means):
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert len(events) == 5  # float32, bfloat16, float64, complex64, and the sparse one


def test_a_hook_on_a_gradient_keeps_neither_its_object_nor_the_parameter_alive():
    class Counting:
        calls = 0

        def __init__(self, parameter):
            self.parameter = parameter  # as the classes of the project do
            sync.GradientSync.on_gradient(parameter, self.count, 2)

        def count(self, number, parameter):
            self.calls += number * parameter.numel()

    counting = Counting(torch.nn.Parameter(torch.ones(3)))
    counting.parameter.sum().backward()
    assert counting.calls == 6
    alive = weakref.ref(counting), weakref.ref(counting.parameter)
    del counting
    gc.collect()
    assert [one() for one in alive] == [None, None]


GRADIENT = 0.6875  # exact in both types; the sum of 320 parts of it in bfloat16 would be 0.84


@dataclass
class Sums(Model):
    """The gradient of every weight is that of the input."""

    def build(self) -> nn.Module:
        return nn.Linear(4, 2, bias=False)

    def losses(self, module: nn.Module, batch: Any) -> Iterator[Loss]:
        yield Loss(module(batch["pixel_values"]).float().sum(), float(len(batch["labels"])))


@dataclass(frozen=True)
class Ones(matrix.Case):
    @property
    def model(self) -> Model:
        return Sums()

    @property
    def samples(self) -> list[dict[str, Tensor]]:
        return [{"pixel_values": torch.full((4,), GRADIENT), "labels": 0} for _ in range(self.size)]

    def prepared(self, module: nn.Module) -> nn.Module:
        return module


def gradients(case: Ones) -> list[Tensor]:
    """The gradients of two steps as the optimizer has them; on several ranks, DDP reduces those of the second."""
    found = []
    _, stepper, windows, _ = matrix.set_up(case, decide_plan(case.recipe, case.world_size))
    stepper.optimizer.register_step_pre_hook(lambda *_: found.extend(p.grad.clone() for p in stepper.parameters))
    for window in windows.epoch(0, 0, 2):
        stepper.step(window)
    return found


@pytest.mark.parametrize(("precision", "bits"), [("bf16-true", 8), pytest.param("16-true", 11, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_weights_in_half_precision_are_summed_in_float32(precision, bits, world_size, ranks):
    size = 320 * world_size
    memory = Memory(micro_batch_size=1, precision=precision)
    case = Ones("ones", memory, world_size, size=2 * size, batch_size=size, optim=Optim("sgd", lr=1.0))
    for found in ranks(2).run(gradients, case) if world_size > 1 else [gradients(case)]:
        assert [gradient.dtype.itemsize for gradient in found] == [2, 2]
        for gradient in found:  # each part is rounded, the sum is, and once more where DDP reduces it
            assert (gradient.double() / GRADIENT - 1).abs().max() <= 3 * 2.0**-bits
