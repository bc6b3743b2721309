"""Augmentation: torchvision's transforms with its draws, the same for any workers and cut, and refusals by name."""

import numpy as np
import pytest
import torch
from helpers.prepared import prepared
from torchvision.transforms import v2

from trainer.data import CIFAR10, Digits
from trainer.data.loader import Loader, SampleError
from trainer.errors import RecipeError
from trainer.values import Request

GREY = 255 * sum((0.485, 0.456, 0.406)) / 3
FLIP = v2.RandomHorizontalFlip()
CASES = {
    "randaugment": ({"augment": "randaugment"}, [FLIP, v2.RandAugment()]),
    "autoaugment": ({"augment": "autoaugment"}, [FLIP, v2.AutoAugment()]),
    "trivialaugment": ({"augment": "trivialaugment", "mirror": False}, [v2.TrivialAugmentWide()]),
    "color_jitter": ({"color_jitter": 0.4}, [v2.ColorJitter(0.4, 0.4, 0.4)]),
    "erasing": ({"erasing": 0.5}, [v2.RandomErasing(0.5, value=GREY)]),
    "all": (
        {"augment": "randaugment", "color_jitter": 0.3, "erasing": 0.9, "random_resized_crop": 0.2},
        [FLIP, v2.RandAugment(), v2.ColorJitter(0.3, 0.3, 0.3), v2.RandomErasing(0.9, value=GREY)],
    ),
}


@pytest.fixture(scope="module")
def coloured(tmp_path_factory):
    """Images of 32 x 32 pixels as CIFAR-10 has them, of two classes."""
    path = tmp_path_factory.mktemp("images") / "drawn.npz"
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), np.uint8)
    np.savez(path, images=images, labels=[0, 1] * 8, split=[0] * 12 + [1] * 4, class_names=["a", "b"])
    return lambda **settings: prepared(CIFAR10(str(path), **settings))


def inverted(image):
    """An own transform that draws, and gives another size."""
    return 255 - image[:, :, : 16 + int(torch.randint(8, (1,)))]


def scaled(image):
    return image / 255


@pytest.mark.parametrize("case", CASES)
def test_settings_are_torchvisions_transforms_with_the_same_draws(coloured, case):
    settings, steps = CASES[case]
    data = coloured(image_size=24, **settings)
    least = settings.get("random_resized_crop")
    cut = [v2.RandomResizedCrop(24, (least, 1.0))] if least else [v2.Resize(24), v2.CenterCrop(24)]
    transform = v2.Compose([*cut, *steps])
    plain, changed = coloured(image_size=24).train, 0
    for seed in range(12):
        torch.manual_seed(seed)
        theirs = transform(data.train.images[seed])
        torch.manual_seed(seed)
        drawn, _ = data.train.draw(seed)
        assert torch.equal(drawn, theirs)
        changed += not torch.equal(drawn, plain.draw(seed)[0])
    assert changed > 3
    assert data.train.augmented
    assert not data.test.augmented


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_depend_on_their_seeds_and_on_no_cut_and_no_worker(workers):
    data = prepared(Digits(augment="randaugment", erasing=0.5, random_resized_crop=0.5, transform=inverted))

    def load(size, workers=0):
        pieces = [range(start, min(start + size, 10)) for start in range(0, 10, size)]
        requests = [Request([7 * k for k in piece], [99 * k for k in piece]) for piece in pieces]
        loader = Loader(data.train, data.collate, workers=workers)
        return torch.cat([batch["pixel_values"] for batch in loader(requests)])

    whole = load(10)
    assert torch.equal(whole, load(3, workers))
    assert torch.equal(whole, load(1))
    assert not torch.equal(whole[0], load(10)[1])


def test_what_a_sample_is_changes_the_fingerprint_and_defaults_do_not():
    kinds = [{}, {"augment": "crop_flip"}, {"augment": "crop_flip", "mirror": False}, {"erasing": 0.1}]
    kinds += [{"erasing": 0.2}, {"transform": inverted}, {"transform": scaled}]
    kinds += [{"transform": v2.RandomInvert(0.1)}, {"transform": v2.RandomInvert(0.2)}]
    found = [prepared(Digits(**settings)).train.fingerprint() for settings in kinds]
    assert len(set(found)) == len(kinds)
    pixels = prepared(Digits(augment="flip")).train.pixels
    assert pixels.settings == ([8, 8], [0.3053], [0.3760], "flip")  # as in checkpoints from before there was more


def test_an_own_transform_that_gives_no_image_is_refused_by_name_and_one_that_fails_names_its_sample():
    data = prepared(Digits(transform=scaled))
    said = r"data\.transform: scaled returned torch\.float32 \(1, 8, 8\) for an image torch"
    with pytest.raises(RecipeError, match=said):
        list(Loader(data.train, data.collate)([Request([0], [1])]))
    data = prepared(Digits(transform=lambda image: image[5]))
    with pytest.raises(SampleError, match=r"scikit-learn digits image \d+ .* could not be loaded: IndexError"):
        list(Loader(data.train, data.collate)([Request([0], [1])]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment": "randaug"}, r"data\.augment='randaug' is not one of none, flip, crop_flip, randaugment"),
        ({"augment": "flip", "mirror": False}, r"data\.mirror=false disables all of data\.augment=flip"),
        ({"random_resized_crop": 1.5}, r"data\.random_resized_crop=1\.5 must be a number from 0 to 1; null is off"),
        ({"random_resized_crop": 0}, r"data\.random_resized_crop=0 would be an empty image"),
        ({"erasing": -0.1}, r"data\.erasing=-0\.1 must be a number from 0 to 1; 0 is off"),
        ({"color_jitter": "0.4"}, r"data\.color_jitter='0\.4' must be a number"),
        ({"transform": "my.function"}, r"transform='my\.function' is not a function: give one in a Python recipe"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Digits(**settings)
