"""Several datasets as one: drawn by weight, the same for any cut and ranks, resumed, and refused by name."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from helpers.prepared import prepared
from helpers.resumed import losses
from helpers.rounding import ROUNDING

from trainer import Checkpoint, Memory, Optim, Recipe, Run
from trainer.api import fit
from trainer.commands.classes import with_classes
from trainer.commands.flags import RecipeParser
from trainer.contract import Data
from trainer.data import CIFAR10, Digits, Mixture
from trainer.data.fingerprint import fingerprint
from trainer.data.loader import Loader
from trainer.engine.data_feed import make_windows
from trainer.errors import RecipeError
from trainer.models import MLP
from trainer.settings import change, settings_of
from trainer.values import ShuffleGroups


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Two datasets of 30 and 90 training images, one dark and one bright, of the same two classes; or of others."""
    folder = tmp_path_factory.mktemp("mixture")

    def make(name, count, least, classes=("a", "b"), size=32, **settings):
        images = np.random.default_rng(least).integers(least, least + 100, (count, size, size, 3), np.uint8)
        split = [0] * (count - 10) + [1] * 10
        labels = [number % len(classes) for number in range(count)]
        np.savez(folder / f"{name}.npz", images=images, labels=labels, split=split, class_names=list(classes))
        return CIFAR10(str(folder / f"{name}.npz"), image_size=8, **settings)

    return make


def mixture(drawn, weights=(0.7, 0.3), **settings):
    return Mixture([(drawn("dark", 40, 0), weights[0]), (drawn("bright", 100, 150, **settings), weights[1])])


def test_datasets_are_drawn_by_their_weights_whatever_their_sizes(drawn):
    data = prepared(mixture(drawn, (1.4, 0.6)))
    assert (len(data.train), data.val, len(data.test)) == (120, None, 20)
    chances = np.asarray(data.sample_weights())
    assert (chances[:30].sum() / chances.sum(), chances[30:].sum() / chances.sum()) == pytest.approx((0.7, 0.3))
    assert (data.class_names, data.num_classes, data.channels, data.image_size) == (["a", "b"], 2, 3, 8)
    assert "bright" not in data.train.describe(0)
    assert data.train.describe(31) == "CIFAR10 train image 1 (the first is image 0)"
    assert data.train.labels == [0, 1] * 60
    bright = [bool(data.train[index]["pixel_values"].mean() > 0) for index in range(120)]
    assert bright == [False] * 30 + [True] * 90
    recipe = Recipe(model=MLP(num_classes=2, image_size=8, channels=3), data=data, batch_size=16)
    windows = make_windows(recipe, Loader(data.train, data.collate))
    places = [(epoch, step) for epoch in range(40) for step in range(windows.steps(epoch))]
    pieces = [piece for place in places for piece in windows.pieces(*place)]
    counted = Counter(index >= 30 for piece in pieces for index in piece)
    assert sum(counted.values()) == 40 * 120
    assert 0.27 < counted[True] / 4800 < 0.33


def test_parts_are_named_in_yaml_and_flags_too():
    parts = [["Digits", {"augment": "crop_flip"}, 3], ["Digits", 1]]
    data = prepared(Mixture(parts))
    assert len(data.train) == 2 * 1437
    named = Recipe(model=MLP(), data=data, batch_size=4)
    own = Mixture([(Digits(augment="crop_flip"), 3), (Digits(), 1)])
    assert settings_of(named)["data.parts"].value == parts
    assert fingerprint(data) == fingerprint(prepared(own))
    recipe, needed = with_classes(named.replace(data=Digits()), {"data": "Mixture"}, trusted=False)
    assert needed == {"data": ["data.parts"]}
    flags = [("data.parts", "[[Digits, {augment: crop_flip}, 3], [Digits, 1]]")]
    changed = change(recipe, RecipeParser(recipe).read_flags(flags, {}))
    assert [type(data) for data in changed.data.datasets] == [Digits, Digits]
    assert changed.data.datasets[0].augment == "crop_flip"


def test_a_dataset_keeps_its_own_sampling_and_augmentation(drawn):
    lopsided = drawn("dark", 40, 0, sampling={"a": 1.0, "b": 3.0})
    data = prepared(Mixture([(lopsided, 1.0), (drawn("bright", 100, 150, augment="flip"), 1.0)]))
    chances = np.asarray(data.sample_weights())
    assert chances[:30].sum() == pytest.approx(chances[30:].sum())
    assert chances[1] == pytest.approx(3 * chances[0])
    assert data.train.augmented
    assert not data.test.augmented


def test_what_is_mixed_and_how_changes_the_fingerprint(drawn):
    kinds = [mixture(drawn), mixture(drawn, (0.6, 0.4)), mixture(drawn, augment="flip")]
    mixed = [drawn("dark", 40, 0, mixup=0.2), drawn("bright", 100, 150, mixup=0.2)]
    kinds += [Mixture([(one, weight) for one, weight in zip(mixed, (0.7, 0.3), strict=True)])]
    assert len({fingerprint(prepared(data)) for data in kinds}) == 4


def test_a_run_is_the_same_however_it_is_cut_and_is_resumed_where_it_was(drawn, tmp_path, no_pictures):
    def recipe(name, **settings):
        run = Run(dir=str(tmp_path / name), progress=False, accelerator="cpu")
        model = MLP([8], num_classes=2, image_size=8, channels=3)
        plain = Recipe(model=model, data=mixture(drawn, augment="crop_flip"), batch_size=16, epochs=2, run=run)
        plain = plain.replace(checkpoint=Checkpoint(every=5, keep_last=9))
        plain = plain.replace(optim=Optim("sgd", lr=0.05), memory=Memory(micro_batch_size=16, precision="64-true"))
        return plain.replace(**settings)

    fit(recipe("whole"))
    fit(recipe("cut", memory=Memory(micro_batch_size=3, precision="64-true")))
    whole = losses(tmp_path / "whole")
    assert len(whole) == 16
    assert losses(tmp_path / "cut") == pytest.approx(whole, rel=ROUNDING)
    resumed = recipe("resumed")
    fifth = min((tmp_path / "whole" / "checkpoints").glob("step-*5"))
    resumed = resumed.replace(run=replace(resumed.run, resume=str(fifth)))
    with pytest.raises(RecipeError, match=r'with a different recipe: data: "\w+" in the checkpoint, "\w+" now'):
        fit(resumed.replace(data=mixture(drawn, (0.5, 0.5), augment="crop_flip")))
    fit(resumed)
    assert losses(tmp_path / "resumed")[-11:] == whole[-11:]


def test_what_does_not_go_together_is_refused_by_part(drawn):
    first = drawn("dark", 40, 0)
    for other, message in (
        (drawn("others", 40, 0, ("a", "c")), r"part 2 \(CIFAR10\) and part 1 \(CIFAR10\) differ in class_names"),
        (replace(first, image_size=16), r"part 2 .* differ in image_size, 16 and 8: make them the same"),
        (Digits(), r"part 2 \(Digits\) and part 1 \(CIFAR10\) differ in num_classes, 10 and 2"),
        (replace(first, mixup=0.5), r"part 2 .* differ in data\.mixup, data\.cutmix or data\.mix_probability"),
    ):
        with pytest.raises(RecipeError, match=message):
            prepared(Mixture([(first, 0.5), (other, 0.5)]))
    streamed = Data()
    streamed.prepare = lambda tokenizer=None: None
    streamed.train = type("Split", (list,), {"groups": ShuffleGroups((1,), 1)})([0])
    with pytest.raises(RecipeError, match=r"part 1 \(Data\) reads its samples group by group"):
        prepared(Mixture([(streamed, 1.0)]))
    for parts, message in (
        ([], r"data\.parts=\[\]: give a dataset and its weight for each part, or \[CLASS"),
        ([first], r"part 1 is CIFAR10.*: give a dataset and its weight"),
        ([["Digts", 1.0]], r"part 1: there is no dataset Digts: use one of CIFAR10, .*Digits"),
        ([["Digits", {"rot": "x"}, 1.0]], r"part 1: Digits has no setting rot: use one of .*sampling, .*augment"),
        ([["ImageFolder", 1.0]], r"part 1: ImageFolder needs the setting root: add it"),
        ([["Digits", [1], 1.0]], r"part 1: \[1\] must be a mapping of settings of Digits"),
        ([["ImageFolder", {"root": 5}, 1.0]], r"part 1: ImageFolder\.root=5 must be a text"),
        ([["ImageFolder", {"root": None}, 1.0]], r"part 1: ImageFolder\.root=None must be a text"),
        ([["Digits", {"val_fraction": "x"}, 1.0]], r"part 1: Digits\.val_fraction='x' must be a number"),
        ([(first, 1e308), (first, 1e308)], r"the sum of the weights overflows"),
        ([(first, 0)], r"part 1 \(CIFAR10\) has the weight 0: it must be a finite number greater than 0"),
        ([(first, 10**400)], r"has the weight 10{39}: it must be a finite number"),
        ([(first, 0.5), (first, "0.5")], r"part 2 \(CIFAR10\) has the weight '0\.5'"),
    ):
        with pytest.raises(RecipeError, match=message):
            Mixture(parts)
