"""Every sample is evaluated exactly once, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from helpers.problems import Problem, collate, make_fabric, make_model, make_samples
from helpers.rounding import ROUNDING

from trainer.contract import Data
from trainer.engine.forward import Forward
from trainer.launching.world import World
from trainer.memory.plan import decide_plan
from trainer.recipe import Memory, Recipe
from trainer.run.evaluation import make_evaluation
from trainer.run.session import Session

SIZES = [1, 2, 13, 31]


class Samples(list):
    """A list of samples."""


class Own(Data):
    def __init__(self, size):
        self.test = Samples(make_samples(Problem("mlp", size, 1, 1)))
        self.num_classes = 5

    def collate(self, samples):
        return collate(samples)


def evaluate_on(size, world_size):
    model = make_model("mlp")
    fabric = make_fabric("64-true", world_size)
    torch.manual_seed(0)
    module = fabric.setup_module(model.build().double())
    recipe = Recipe(model=model, data=Own(size), batch_size=8, memory=Memory(micro_batch_size=2))
    forward = Forward(fabric, model, module)
    forward.module.train()
    session = Session(recipe, decide_plan(recipe, world_size), fabric, World("python", "cpu", world_size))
    result = make_evaluation(session, forward, "test")()
    assert forward.module.training
    return result.loss, result.accuracy, result.samples, result.confusion.tolist()


def test_ranks_agree_with_one_process_on_every_size(ranks):
    for size in SIZES:
        loss, accuracy, samples, confusion = evaluate_on(size, 1)
        assert samples == size
        for answer in ranks(3).run(evaluate_on, size, 3):
            assert answer[0] == pytest.approx(loss, rel=ROUNDING)
            assert answer[1:] == (accuracy, samples, confusion)


def test_one_process_agrees_with_plain_pytorch():
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    module = make_model("mlp").build().double().eval()
    batch = collate(make_samples(Problem("mlp", 31, 1, 1)))
    logits = module(batch["pixel_values"].double())
    loss, accuracy, *_ = evaluate_on(31, 1)
    assert loss == pytest.approx(cross_entropy(logits, batch["labels"]).item(), rel=ROUNDING)
    assert accuracy == pytest.approx((logits.argmax(1) == batch["labels"]).double().mean().item())


def test_evaluation_is_cut_as_training_is_after_a_recovery():
    model, fabric = make_model("mlp"), make_fabric("64-true", 1)
    recipe = Recipe(model=model, data=Own(31), batch_size=16, memory=Memory(micro_batch_size=8))
    session = Session(recipe, decide_plan(recipe, 1), fabric, World("python", "cpu", 1))
    forward = Forward(fabric, model, fabric.setup_module(model.build().double()))
    sizes = []
    losses = forward.losses
    forward.losses = lambda batch, packed: sizes.append(len(batch["labels"])) or losses(batch, packed)
    run = make_evaluation(session, forward, "test")
    run()
    assert max(sizes) == 16
    sizes.clear()
    session.set_cut(session.plan.initial_cut.halved(1).halved(1))
    run()
    assert max(sizes) == 4
    assert sum(sizes) == 31
