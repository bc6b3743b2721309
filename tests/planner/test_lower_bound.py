"""The lower bound from weights alone: never above what a trace needs, and a hopeless budget is answered without one."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from helpers.combinations import ask, covering, likely, name_of
from helpers.tiny import MODELS, recipe_of, target_of
from helpers.traced import Own, own_recipe
from torch import nn

from trainer.commands.recipes import load_recipe
from trainer.errors import RecipeError
from trainer.memory.plan import Plan, decide_plan
from trainer.planner import search as searching
from trainer.planner.lower_bound import lower_bound, measure
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.planner.search import Search, plan
from trainer.recipe import Memory, Optim, Recipe
from trainer.settings import change
from trainer.system.child_jobs import ChildError, run_in_children

ONE_RANK: list[dict[str, Any]] = [
    {},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true"},
    {"precision": "bf16-mixed", "cpu_offload": "optimizer", "activation_checkpointing": "full"},
    {"cpu_offload": "parameters", "activation_checkpointing": "full", "activation_offload": True},
    {"precision": "bf16-mixed", "cpu_offload": "parameters"},
    {"optimizer_in_backward": True, "micro_batch_size": 8},
]
FOUR_RANKS: list[dict[str, Any]] = [
    {"strategy": "ddp"},
    {"strategy": "fsdp", "precision": "bf16-mixed"},
    {"strategy": "fsdp", "reshard_after_forward": False, "activation_checkpointing": "full"},
    {"strategy": "fsdp", "replicas": 2, "optimizer_in_backward": True, "micro_batch_size": 2},
    {"cpu_offload": "parameters", "precision": "bf16-mixed"},
]


def bound_and_peak(recipe: Recipe, ranks: int) -> list[int]:
    """The lower bound and the traced peak; this changes torch, so it needs a process of its own."""
    plan = decide_plan(recipe, ranks)
    bound = sum(lower_bound(measure(recipe), plan, recipe).values())
    return [bound, predict_in_process(recipe, plan, target_of(), priced=False)["allocated"]]


def check(jobs: dict[str, Any]) -> list[float]:
    """Each lower bound as a share of its peak, after checking that none is above it; refused plans are left out."""
    names, shares, wrong = list(jobs), [], []
    for number, result in run_in_children(list(jobs.values()), 2):
        if isinstance(result, RecipeError):
            continue
        if isinstance(result, Exception):
            raise result
        bound, peak = result
        shares.append(bound / peak)
        if bound > peak:
            wrong.append(f"{names[number]}: {bound:,} is above {peak:,}")
    assert not wrong, "\n".join(wrong)
    return shares


def jobs_of(recipe: Recipe, memories: Sequence[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """A job for each of the settings with the smallest micro-batch, whose peak is closest to the bound."""
    changed = {str(one): recipe.replace(memory=Memory(**{"micro_batch_size": 1} | one)) for one in memories}
    return {f"{ranks}: {name}": partial(bound_and_peak, one, ranks) for name, one in changed.items()}


def test_the_bound_is_at_most_the_traced_peak_and_more_than_nothing():
    recipe = own_recipe(batch_size=8, optim=Optim("adamw"))
    shares = check(jobs_of(recipe, ONE_RANK, 1) | jobs_of(recipe, FOUR_RANKS, 4))
    assert len(shares) == len(ONE_RANK) + len(FOUR_RANKS)
    assert min(shares) > 0


@pytest.mark.slow
def test_the_bound_is_at_most_the_peak_of_real_models():
    """ViT-B/16 and DistilBERT with all their layers, and with other optimizers."""
    importlib.import_module("transformers.models.distilbert.modeling_distilbert")
    jobs = {}
    for name, flags in {
        "vit_cifar10": {"model.name": "vit_b_16", "model.weights": None},
        "distilbert_imdb": {"model.name": "distilbert", "model.weights": None},
    }.items():
        recipe = prepare_recipe(change(load_recipe(name)[0], flags | {"batch_size": 8}), outlines=True)
        for optim in (Optim("adamw"), Optim("sgd", momentum=0.9)):
            own = recipe.replace(optim=optim)
            found = jobs_of(own, ONE_RANK, 1) | jobs_of(own, FOUR_RANKS, 4)
            jobs |= {f"{name}, {optim.name}, {key}": job for key, job in found.items()}
    assert max(check(jobs)) > 0.8


@pytest.mark.slow
def test_the_bound_is_at_most_the_peak_of_any_combination():
    for name in ("distilbert", "big_bird"):
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    jobs, models = {}, cycle(name for name in MODELS if name != "bigbird")
    plans = [{**values, "model": next(models)} for values in likely(1_500) if isinstance(ask(values), Plan)]
    for values in covering(plans, 1):
        knobs = {key: value for key, value in values.items() if key in Memory.__dataclass_fields__}
        memory = Memory(strategy=values["place"][0], **knobs)
        optim = Optim(values["optim"], weight_decay=0.1, clip_norm=values["clip_norm"])
        recipe = recipe_of(values["model"], memory, optim, accumulate=values["accumulate"])
        jobs[name_of(values)] = partial(bound_and_peak, recipe, values["place"][1])
    check(jobs)


class Huge(nn.Module):
    """More than 10^12 weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(*[nn.Linear(20_000, 20_000) for _ in range(50)]) for _ in range(50)]
        self.layers = nn.ModuleList(layers)


@dataclass
class HugeModel(Own):
    blocks = (nn.Sequential,)

    def build(self) -> nn.Module:
        return Huge()


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(calls: Any) -> Any:
        assert not list(calls), "a plan was traced"
        return []

    monkeypatch.setattr(searching, "run_in_children", traced)


@pytest.mark.usefixtures("untraced")
def test_what_cannot_fit_is_answered_without_a_trace():
    recipe = own_recipe(batch_size=8)
    report = plan(recipe, gpu="rtx-3060", budget="1KB")
    assert (report.chosen, report.candidates) == (None, [])
    first, second = report.explanations
    assert first.startswith("no plan fits in 1,000 bytes: a rank needs more than 0.5 MB, even without activations: ")
    assert "the weights of a block and outside blocks 0.5 MB" in first.replace("weights of", "the weights of")
    assert second == "nothing was traced, because the weights alone need more"
    huge = plan(replace(recipe, model=HugeModel()), gpu="h100-sxm", budget="40GB")
    assert "no plan fits in 40.00 GB: a rank needs more than 80.00 GB" in huge.explanations[0]
    assert huge.to_json()["chosen"] is None


def test_weights_that_cannot_be_counted_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(job: Any) -> Any:
        calls.append(job)
        raise ChildError("build() reads a file")

    recipe = own_recipe()
    search = Search(recipe, target_of("rtx-3060"), 1)
    monkeypatch.setattr(searching, "run_in_child", failing)
    one = decide_plan(recipe.replace(memory=Memory(micro_batch_size=8)), 1)
    assert [search._bound(one) for _ in range(3)] == [{}] * 3
    assert len(calls) == 1
