"""What ``memory.compile`` compiles: as many graphs for many shapes as for a few; and what CUDA graphs go with."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from trainer import Memory, Optim, Recipe, RecipeError
from trainer.contract import Data
from trainer.memory import stack
from trainer.memory.plan import decide_plan, plan_warnings
from trainer.models import MLP

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
    stack._compile(list(module.distilbert.transformer.layer), graphs=True)
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
    assert ["no GPU has seen it yet" in line for line in plan_warnings(recipe(), on_gpu=True)] == [True]
    assert ["does what blocks does" in line for line in plan_warnings(recipe(), on_gpu=False)] == [True]
