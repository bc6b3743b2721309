"""Data that is not here: planned by its spec, with the peak that it has when it is here."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.tiny import prediction_of

from trainer import Data, DataSpec
from trainer.cli import run
from trainer.commands.recipes import load_recipe
from trainer.data import CIFAR10, FashionMNIST, ImageFolder, IMDb, TextFiles
from trainer.errors import RecipeError
from trainer.models import MLP, CausalLM, TextClassifier, VisionTransformer
from trainer.planner.predict import prepare_recipe
from trainer.planner.search import search_for
from trainer.planner.synthetic_data import SyntheticData
from trainer.recipe import Memory, Optim, Recipe

ONE = ("--memory.cpu_offload", "optimizer", "--memory.activation_checkpointing", "full", "--gpu", "rtx-4090")
ONE += ("--memory.activation_offload", "true")
TINY_VIT = {"patch_size": 8, "layers": 1, "heads": 2, "width": 16, "mlp_width": 32}
TINY_BERT = {"n_layers": 1, "dim": 16, "hidden_dim": 16, "n_heads": 2}


@pytest.fixture(autouse=True)
def fresh_clone(tmp_path, monkeypatch):
    """A folder without data, no network, and a hub's cache with nothing in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def recipe_of(model: Any, data: Data, **memory: Any) -> Recipe:
    return Recipe(
        model=model, data=data, optim=Optim("adamw"), batch_size=8, memory=Memory(micro_batch_size=4, **memory)
    )


def shapes(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(torch.as_tensor(value).shape) for name, value in sample.items()}


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (("mlp_fashion_mnist",), "60,000 synthetic samples of shape 1 × 28 × 28, from its spec"),
        (("vit_cifar10",), "50,000 synthetic samples of shape 3 × 224 × 224, from its spec"),
        (
            ("distilbert_imdb", "--model.name", "distilbert"),
            "25,000 synthetic samples of 512 tokens, the maximum of data.max_length",
        ),
        (
            ("bigbird_imdb", "--model.name", "big_bird"),
            "25,000 synthetic samples of 4,096 tokens, the maximum",
        ),
    ],
)
def test_packaged_recipes_are_ready_to_plan_in_a_fresh_clone(flags, note):
    from trainer.commands.recipes import parse_command

    recipe = parse_command("plan", "RECIPE", list(flags)).recipe
    search = search_for(recipe, "rtx-4090", 1, 1)
    assert isinstance(search.recipe.data, SyntheticData)
    assert search.recipe.model.num_classes == (2 if "imdb" in flags[0] else 10)
    assert note in next(iter(search.notes))
    assert recipe.data.train is None  # what a run would read is as it was
    with pytest.raises(RecipeError):
        prepare_recipe(recipe)


@pytest.mark.slow
def test_a_plan_without_the_data_says_so_and_keeps_the_command(capsys):
    sizes = [f"--model.{name}={value}" for name, value in TINY_VIT.items()]
    argv = ["plan", "vit_cifar10", "--model.name=custom", *sizes, "--data.image_size=32", *ONE, "--json"]
    assert run([*argv, "--model.weights=null"]) == 0
    content = json.loads(capsys.readouterr().out)
    absent, faster = content["notes"]
    assert absent == "the data is missing: planned with 50,000 synthetic samples of shape 3 × 32 × 32, from its spec"
    assert faster.startswith("faster than ")
    assert content["command"].startswith("trainer fit vit_cifar10 --model.name custom ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", pytest.param("texts", marks=pytest.mark.slow)])
def test_what_is_planned_of_an_outline_is_what_the_data_needs(kind, sample_data, tmp_path):
    """The peak is that of the real samples: of images, and of texts that are all longer than max_length."""
    if kind == "images":
        model: Any = VisionTransformer("custom", **TINY_VIT)
        there = recipe_of(model, CIFAR10(root=str(sample_data / "cifar10" / "cifar10_subset.npz")))
        absent = recipe_of(model, CIFAR10())
    else:
        texts = IMDb(root=str(sample_data / "imdb_folder"), max_length=32, cache_dir=str(tmp_path / "cache"))
        tokenizer = str(sample_data / "tokenizers" / "bert-base-uncased")
        model = TextClassifier("distilbert", tokenizer=tokenizer, config=TINY_BERT)
        there = recipe_of(model, texts)
        # Its words are those of the configuration, which has as many.
        absent = recipe_of(dataclasses.replace(model, tokenizer=None), IMDb(max_length=32))
    real, made_up = (prepare_recipe(one, outlines=True) for one in (there, absent))
    assert real.data.train is not None
    assert not isinstance(real.data, SyntheticData)
    assert shapes(real.data.collate([real.data.train[0]])) == shapes(made_up.data.train.__getitems__([0]))
    found, wanted = prediction_of(made_up), prediction_of(real)
    assert (found.allocated, found.reserved, found.phases) == (wanted.allocated, wanted.reserved, wanted.phases)


def test_outlines_are_of_what_is_not_here(sample_data, tmp_path):
    fashion = FashionMNIST(root=str(sample_data / "fashion_mnist"), val_fraction=0.1)
    assert fashion.spec() is None
    spec = FashionMNIST(val_fraction=0.1).spec()
    fashion.prepare()
    assert (spec.train, spec.val, spec.test) == tuple(map(len, (fashion.train, fashion.val, fashion.test)))
    assert spec.num_classes == fashion.num_classes
    assert shapes(fashion.train[0]) == {name: shape for name, (_, shape) in spec.tensors.items()}
    unknown: list[Data] = [CIFAR10(root="x.npz"), CIFAR10(download=False), IMDb(root="./x"), IMDb(root="my/reviews")]
    unknown += [TextFiles("x.csv"), ImageFolder("x")]
    assert [data.spec() for data in unknown] == [None] * len(unknown)
    (tmp_path / "datasets" / "stanfordnlp___imdb").mkdir(parents=True)  # as the datasets library keeps it
    assert IMDb().spec() is None


def test_longer_texts_than_the_model_takes_are_refused_as_with_the_data():
    recipe = recipe_of(TextClassifier("distilbert"), IMDb(max_length=513))
    with pytest.raises(
        RecipeError, match=r"data.max_length=513 is more than the max of 512 tokens of model.name='dist"
    ):
        prepare_recipe(recipe, outlines=True)


def test_a_configuration_that_is_not_here_is_told_with_what_is_enough():
    with pytest.raises(RecipeError, match=r"give a folder with config.json as model.name, or a model type"):
        prepare_recipe(recipe_of(TextClassifier("nobody/nothing"), IMDb()), outlines=True)


@pytest.mark.parametrize("name", ["distilbert_imdb", "lm_chat", "lm_qlora"])
def test_packaged_recipes_are_planned_without_a_hub(name):
    recipe = prepare_recipe(load_recipe(name)[0], outlines=True)
    assert len(recipe.data.train) > 1000
    assert recipe.model.unloaded()._configuration().vocab_size > 30_000


@dataclass
class Photos(Data):
    """Images of one's own, which are elsewhere."""

    num_classes = 3
    image_size = 8
    channels = 1

    def prepare(self, tokenizer: Any = None) -> None:
        raise FileNotFoundError("/data/photos is not mounted")


class Outlined(Photos):
    def spec(self) -> DataSpec:
        return DataSpec({"pixel_values": ("float32", (1, 8, 8)), "labels": ("int64", ())}, train=24, num_classes=3)


def test_a_dataset_of_ones_own_is_told_the_method_to_write_and_planned_with_it():
    with pytest.raises(RecipeError, match=r"Photos: /data/photos is not mounted; to plan .* define spec\(\) in Pho"):
        prepare_recipe(recipe_of(MLP(), Photos()), outlines=True)
    with pytest.raises(FileNotFoundError):  # a run says what it said
        prepare_recipe(recipe_of(MLP(), Photos()))
    recipe = prepare_recipe(recipe_of(MLP(), Outlined()), outlines=True)
    assert (recipe.model.num_classes, recipe.model.image_size, len(recipe.data.train)) == (3, 8, 24)
    assert prediction_of(recipe).reserved > 0


@pytest.mark.parametrize("data", [TextFiles("x.csv"), ImageFolder("photos")])
def test_files_whose_number_nobody_knows_are_asked_for_by_their_setting(data, sample_data):
    tokenizer = str(sample_data / "tokenizers" / "bert-base-uncased")
    model = TextClassifier("distilbert", tokenizer=tokenizer) if isinstance(data, TextFiles) else MLP()
    with pytest.raises(RecipeError, match=r"^data\.(train_file='x.csv'|root='photos'): there is no f(ile|older) "):
        prepare_recipe(recipe_of(model, data), outlines=True)


def test_whether_texts_are_packed_is_known_of_a_published_model_without_the_hub():
    name = "HuggingFaceTB/SmolLM2-135M"
    assert CausalLM(name, weights=name, tokenizer="none").packs()
