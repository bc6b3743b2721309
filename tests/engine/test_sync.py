"""Gradients that are reduced after the last backward share their collectives."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.collectives import Noted, reductions, watched
from helpers.problems import Problem, engine_run
from torch import Tensor

from trainer.engine import sync


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
