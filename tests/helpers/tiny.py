"""Tiny models of every kind, with data in memory, to be predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor, nn

from helpers.combinations import Trained, tower_file
from helpers.language import FAMILIES, language_model, language_samples
from helpers.pretrained import save_weights
from helpers.problems import CLASSES, OneHead, Problem, collate, make_model, make_samples
from trainer.contract import Data, Model
from trainer.fakegpu.events import Trace
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.prediction import Prediction
from trainer.fakegpu.target import Target
from trainer.memory.plan import Plan, decide_plan
from trainer.models import LoRA
from trainer.planner.predict import predict_in_process, prepare_recipe
from trainer.planner.traced_run import draw_samples, trace_run
from trainer.recipe import Memory, Optim, Recipe
from trainer.system.child_jobs import run_in_child

MODELS = ("tower", "vit", "distilbert", "bigbird", "lora", "batchnorm", "two_losses", "branch")


@dataclass
class InMemory(Data):
    """Samples that are there already; some of them are evaluated on, too."""

    samples: list[dict[str, Tensor]] = field(default_factory=list)

    def prepare(self, tokenizer: Any = None) -> None:
        self.train, self.val = Lengthy(self.samples), Lengthy(self.samples[:7])

    def collate(self, samples: Sequence[Any]) -> Any:
        return collate(samples)


class Lengthy(list):
    """A dataset whose texts are cut by their length."""

    def __init__(self, samples: Sequence[dict[str, Tensor]]) -> None:
        super().__init__(samples)
        if samples and "input_ids" in samples[0]:
            self.lengths = [len(sample["input_ids"]) for sample in samples]


@dataclass
class Normalised(OneHead):
    """Linear layers with BatchNorm between them."""

    def build(self) -> nn.Module:
        layers = [nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU()]
        return nn.Sequential(*layers, *[nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2)])

    def losses(self, module: nn.Module, batch: Any) -> Any:
        from trainer.models.base import classification_loss

        yield classification_loss(module(batch["pixel_values"]), batch["labels"])


def recipe_of(name: str, memory: Memory | None = None, optim: Optim | None = None, **settings: Any) -> Recipe:
    """A recipe of the tiny model ``name``, prepared; its optimizer is AdamW by default."""
    memory = memory or Memory()
    parts = {"model": model_of(name, memory.init == "meta"), "data": InMemory(samples=samples_of(name))}
    parts |= {"optim": optim or Optim("adamw"), "memory": memory, "batch_size": 12, "epochs": 2}
    return prepare_recipe(Recipe(**parts | settings))


def model_of(name: str, starts_on_meta: bool = False) -> Model:
    """The model; its weights are in a local file where they are to be streamed."""
    if name == "tower":
        return Trained("tower", Memory(), weights=tower_file()).model
    if name == "batchnorm":
        return Normalised()
    if name == "lora":
        return replace(make_model("distilbert"), lora=LoRA(rank=2))  # type: ignore[type-var]
    if name == "nf4":
        adapters = LoRA(rank=2, base="nf4")
        return replace(make_model("distilbert"), lora=adapters, weights=weights_of("distilbert"))  # type: ignore[type-var]
    if name in FAMILIES:
        return language_model(name)
    model = make_model(name)
    has_weights = "weights" in {one.name for one in fields(model)}  # type: ignore[arg-type]
    return replace(model, weights=weights_of(name)) if starts_on_meta and has_weights else model  # type: ignore[type-var]


@lru_cache
def weights_of(name: str) -> str:
    """A file or folder with weights of the tiny model."""
    model = make_model(name)
    return save_weights(model, model.build(), Path(mkdtemp(prefix=f"{name}-")))


def samples_of(name: str) -> list[dict[str, Tensor]]:
    """The training set: the last batch of an epoch is smaller."""
    if name == "tower":
        return Trained("tower", Memory()).samples
    if name in FAMILIES:
        return language_samples(29)
    kinds = {"lora": "distilbert", "nf4": "distilbert", "batchnorm": "mlp", "two_losses": "mlp", "branch": "mlp"}
    return make_samples(Problem(kinds.get(name, name), 29, 12, 12))


def target_of(gpu: str = "a100-80gb") -> Target:
    """A card by name."""
    return Target(gpu_named(gpu))


def predict(recipe: Recipe, plan: Plan, target: Target, nodes: int = 1) -> Prediction:
    """What ``plan`` of a prepared recipe needs on ``target``, from a process of its own."""
    return Prediction.from_child(run_in_child(partial(predict_in_process, recipe, plan, target, nodes)))


def prediction_of(recipe: Recipe, ranks: int = 1, nodes: int = 1, gpu: str = "a100-80gb") -> Prediction:
    """What a run of ``recipe`` needs."""
    return predict(recipe, decide_plan(recipe, ranks), target_of(gpu), nodes)


def trace_of(recipe: Recipe, ranks: int = 1, nodes: int = 1, gpu: str = "a100-80gb") -> Trace:
    """What a run of ``recipe`` does. It changes torch for the rest of the process."""
    plan = decide_plan(recipe, ranks)
    return trace_run(recipe, plan, draw_samples(recipe, plan), target_of(gpu), nodes)


__all__ = ["CLASSES", "MODELS", "model_of", "prediction_of", "recipe_of", "samples_of", "target_of", "trace_of"]
