"""The interfaces of models, datasets and splits: capabilities, defaults, and custom code of older versions."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers.prepared import prepared

from trainer import Data, Loss, Memory, Model, Recipe
from trainer.contract import (
    CAPABILITIES,
    Exportable,
    Packable,
    Plannable,
    Preparable,
    Samples,
    Streamable,
    as_samples,
    capability,
    prepare_data,
    splits_of,
    without_weights,
)
from trainer.data import Digits, Mixture
from trainer.data.fingerprint import split_fingerprint
from trainer.engine.data_feed import make_windows
from trainer.errors import RecipeError
from trainer.models import MLP, VisionTransformer


@dataclass
class Plain(Model):
    """A custom model with the two required members."""

    width: int = 4
    weights: str | None = None

    def build(self):
        return torch.nn.Linear(self.width, 2)

    def losses(self, module, batch):
        targets = batch["labels"]
        logits = module(batch["x"])
        yield Loss(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), float(len(targets)))


def test_a_model_has_the_members_for_training_only():
    own = {name for name in vars(Model) if not name.startswith("_")} - {"DEFAULTS"}
    assert own == {"build", "losses", "weigh", "blocks", "loss_names", "conditional", "samples_interact"}
    assert not any(isinstance(Plain(), kind) for kind in CAPABILITIES)


def test_a_model_without_capabilities_gets_their_defaults():
    model = Plain(weights="a.safetensors")
    assert capability(model, Packable).packs() is False
    assert capability(model, Packable).packed({"x": 1}) == {"x": 1}
    assert capability(model, Preparable).tokenizer_or_none() is None
    assert capability(model, Streamable).base_files() == ()
    assert capability(model, Plannable).lossy == ()
    assert capability(model, Exportable).own_format is False
    assert without_weights(model) == Plain(weights=None)
    assert model.task is None
    assert model.num_classes is None
    with pytest.raises(AttributeError, match="'Plain' object has no attribute 'tasks'"):
        _ = model.tasks


def test_members_without_their_class_are_rejected():
    with pytest.raises(RecipeError, match=r"Old defines packed: subclass trainer\.contract\.Packable"):

        class Old(Plain):
            def packed(self, batch):
                return batch

    with pytest.raises(RecipeError, match=r"pretrained, skeleton: subclass trainer\.contract\.Streamable"):

        class Older(Plain):
            def skeleton(self):
                return torch.nn.Linear(4, 2)

            def pretrained(self):
                raise NotImplementedError


def test_the_classes_of_the_package_name_their_capabilities():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class New(Plain, Packable):
            def packed(self, batch):
                return batch

    assert isinstance(VisionTransformer("vit_b_16"), Streamable)
    assert isinstance(MLP(), Plannable)


@dataclass
class Labelled(Data):
    """A custom dataset whose splits are plain lists, with a required field of a name that has a default."""

    num_classes: int
    length: int = 3

    def prepare(self, tokenizer=None):
        self.train = [{"x": torch.ones(4), "labels": position % 2} for position in range(self.length)]


def test_a_plain_list_is_a_split():
    data = Labelled(2)
    prepare_data(data, Plain(), None)
    split = splits_of(data)["train"]
    assert list(splits_of(data)) == ["train"]
    assert (len(split), split[1]["labels"], split.original) == (3, 1, data.train)
    assert (split.lengths, split.labels, split.groups, split.longest, split.augmented) == (None, None, None, (), False)
    assert split.describe(1) == "sample 1 of list"
    assert split.files() == {}
    assert split.fingerprint() is None
    recipe = Recipe(model=Plain(), data=data, batch_size=2, memory=Memory(micro_batch_size=1))
    assert make_windows(recipe, None).size == 3
    with pytest.raises(TypeError, match="num_classes"):
        Labelled()


def test_attributes_of_a_torch_dataset_are_read():
    class Split(torch.utils.data.Dataset):
        lengths, augmented = [5, 7], True
        reads = 0

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return index

        def __getitems__(self, indices):
            return list(indices)

        def describe(self, index):
            return f"row {index}"

        def fingerprint(self):
            return "abc"

        @property
        def labels(self):
            Split.reads += 1
            return [0, 1]

    split = as_samples(Split())
    assert (split.lengths, split.augmented, split.describe(0)) == ([5, 7], True, "row 0")
    assert split.__getitems__([1]) == [1]
    assert split_fingerprint(Split()) == "abc"
    assert Split.reads == 0  # labels may be expensive
    assert split.labels == [0, 1]
    assert as_samples(split) is split


def test_a_split_of_samples_needs_two_methods():
    class Two(Samples):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"x": torch.ones(4), "labels": index}

    split = as_samples(Two())
    assert split.original is split
    assert split_fingerprint(Two()) == split_fingerprint([split[0], split[1]])
    with pytest.raises(NotImplementedError, match=r"Samples must define __len__"):
        len(Samples())


def test_recipes_that_share_a_dataset_do_not_change_each_other():
    data = Labelled(2)
    before = dict(vars(data))
    first = Recipe(model=MLP(task="regression"), data=data, batch_size=2)
    Recipe(model=MLP(task="multi_label"), data=data, batch_size=2)
    assert vars(data) == before
    prepare_data(data, first.model, None)
    prepared_state = dict(vars(data))
    Recipe(model=MLP(task="multi_label"), data=data, batch_size=2)
    assert vars(data) == prepared_state
    assert data._task == "regression"


def test_prepare_gets_the_model_if_it_takes_it():
    class New(Labelled):
        def prepare(self, tokenizer=None, model=None):
            self.found = tokenizer, model

    model, new = MLP(task="regression"), New(2)
    prepare_data(new, model, "words")
    assert new.found == ("words", model)


def test_a_subclass_of_a_built_in_dataset_with_the_old_signature_still_knows_the_model():
    class Old(Digits):
        def prepare(self, tokenizer=None):
            super().prepare(tokenizer)

    seen = SimpleNamespace(size=12, mean=(0.5,), std=(0.25,))
    model = MLP()
    model.image_input = lambda: seen
    data = Old(image_size=None)
    prepare_data(data, model, None)
    assert data.image_size == 12
    assert prepared(Digits()).image_size != 12


def test_every_dataset_of_a_mixture_knows_the_model():
    mixture, model = Mixture([(Digits(), 1), (Digits(), 1)]), MLP()
    prepare_data(mixture, model, None)
    assert all(data._model is model for data in mixture.datasets)
    assert mixture.train.labels == mixture.datasets[0].train.labels.tolist() * 2


def test_a_batch_that_is_a_tensor_has_no_labels_to_weigh():
    with pytest.raises(RecipeError, match=r"has no weigh\(\), and its micro-batches have no tensor 'labels'"):
        Plain().weigh(torch.ones(3))
