"""What ``memory.compile`` compiles: as many graphs for many shapes as for a few; and what CUDA graphs go with."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
import torch
from helpers.matrix import Case, plain_run, set_up, steps_of
from helpers.rounding import ROUNDING
from torch import nn
from torch._dynamo.utils import counters
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from trainer import Memory, Optim, Recipe, RecipeError
from trainer.contract import Data
from trainer.engine.step import PhaseHooks
from trainer.memory.compilation import compile_module
from trainer.memory.plan import decide_plan
from trainer.models import MLP
from trainer.run.description import plan_warnings

MOST_GRAPHS = 6
"""For training and evaluation: of one shape, of any length, of any length and number of samples, and of one sample."""


@pytest.mark.slow
def test_texts_of_any_length_compile_a_bounded_number_of_graphs(monkeypatch):
    """By Dynamo, which decides what is compiled again; what the compiler proper makes of it takes 20 s a graph."""
    compile_with = nn.Module.compile
    modes: list[str | None] = []

    def without_inductor(module: nn.Module, mode: str | None = None) -> None:
        modes.append(mode)
        compile_with(module, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", without_inductor)
    torch._dynamo.reset()
    counters.clear()
    config = DistilBertConfig(dim=16, n_heads=2, n_layers=2, hidden_dim=32, vocab_size=50)
    module = DistilBertForSequenceClassification(config)
    compile_module(module, list(module.distilbert.transformer.layer), "cuda_graphs")
    assert modes == ["reduce-overhead"] * 2
    generator, shapes = random.Random(0), set()
    for step in range(16):
        samples, tokens = generator.choice((4, 4, 3, 1)), 8 * generator.randrange(1, 33)
        shapes.add((samples, tokens))
        mask = torch.ones(samples, tokens, dtype=torch.long)
        mask[1:, tokens // 2 :] = 0
        module.train(step < 11)
        with torch.set_grad_enabled(step < 11):
            logits = module(input_ids=torch.ones_like(mask), attention_mask=mask).logits
        if step < 11:
            logits.sum().backward()
    assert len(shapes) > 2 * MOST_GRAPHS
    assert 0 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    assert not counters["unimplemented"]
    torch._dynamo.reset()


def recipe(**memory) -> Recipe:
    wishes = Memory(**{"micro_batch_size": 8, "compile": "cuda_graphs"} | memory)
    return Recipe(model=MLP([8]), data=Data(), optim=Optim("adamw"), batch_size=8, memory=wishes)


@pytest.mark.parametrize(
    "memory",
    [
        {"strategy": "fsdp"},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": 0.5},
        {"activation_offload": True},
        {"cpu_offload": "optimizer"},
        {"optimizer_in_backward": True},
        {"micro_batch_tokens": 64},
    ],
    ids=str,
)
def test_what_moves_the_memory_of_a_cuda_graph_is_refused(memory):
    with pytest.raises(RecipeError, match=r"^memory\.compile=cuda_graphs .*: use memory\.compile blocks"):
        decide_plan(recipe(**memory), 1)


def test_a_plan_with_cuda_graphs_says_that_no_gpu_has_seen_it():
    assert "compiled cuda_graphs" in decide_plan(recipe(), 1).describe()
    assert ["not yet tested on a GPU" in line for line in plan_warnings(recipe(), on_gpu=True)] == [True]
    assert ["it is the same as blocks" in line for line in plan_warnings(recipe(), on_gpu=False)] == [True]


class Pooled(torch.autograd.Function):
    """A product whose gradient of the weight is written where the last one was, as a replayed CUDA graph does."""

    pool: ClassVar[dict[tuple[int, ...], torch.Tensor]] = {}

    @staticmethod
    def forward(ctx, inputs, weight, bias):
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t() + bias

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        found = Pooled.pool.setdefault(tuple(weight.shape), torch.empty_like(weight))
        return gradient @ weight, found.copy_(rows.t() @ inputs.flatten(0, -2)).view_as(found), rows.sum(0)


class Storages(PhaseHooks):
    """Notes where the gradients are at the end of every micro-step."""

    def __init__(self, module):
        self.module, self.found = module, []

    def enter(self, phase, micro=None):
        if phase == "step" or (phase == "forward" and micro is not None):
            self.found.append([p.grad.data_ptr() for p in self.module.parameters() if p.grad is not None])


@pytest.mark.parametrize("how", ["cuda_graphs", "blocks"])
def test_gradients_of_a_cuda_graph_accumulate_in_memory_that_it_does_not_overwrite(how, monkeypatch):
    """The steps are those without a graph's pool; without memory of their own they are not (``blocks``)."""
    case = Case("vit", Memory(micro_batch_size=2, precision="64-true", compile=how))
    expected = plain_run(case)
    monkeypatch.setattr(nn.Module, "compile", lambda module, mode=None: None)
    monkeypatch.setattr(nn.functional, "linear", lambda inputs, weight, bias: Pooled.apply(inputs, weight, bias))
    Pooled.pool.clear()
    _, stepper, windows, stack = set_up(case, decide_plan(case.recipe, 1))
    stepper.phases = storages = Storages(stack.module)
    for epoch, step in steps_of(case):
        stepper.step(next(iter(windows.epoch(epoch, step, step + 1))))
    found = {name: value.detach() for name, value in stack.module.state_dict().items()}
    wrong = max(float((found[name] - value).norm() / value.norm()) for name, value in expected["state"].items())
    if how == "blocks":
        assert wrong > 1e-6
        return
    assert wrong <= ROUNDING
    there = [places for places in storages.found if places]
    assert len(there) > len(steps_of(case))  # several micro-steps a step
    assert all(places == there[0] for places in there)
