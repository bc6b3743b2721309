"""Image datasets on real images: shapes, splits, augmentation, and every refusal names what is wrong."""

import itertools
import shutil
import zipfile

import numpy as np
import pytest
import torch
import torchvision
from helpers.prepared import prepared, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torchvision.transforms import v2

from trainer.data import CIFAR10, Digits, FashionMNIST, ImageFolder
from trainer.data import image_splits as arrays
from trainer.data.base import hold_out
from trainer.data.image_splits import FORMATS, read_digits, read_image
from trainer.data.loader import Loader, SampleError
from trainer.errors import RecipeError
from trainer.values import Request


@pytest.fixture(scope="module")
def cifar10(sample_data):
    return lambda **settings: prepared(CIFAR10(str(sample_data / "cifar10" / "cifar10_subset.npz"), **settings))


def test_digits_are_1797_normalised_grey_images_in_three_disjoint_parts():
    data = prepared(Digits(val_fraction=0.1))
    assert sorted(itertools.chain(data.train.rows, data.val.rows, data.test.rows)) == list(range(1797))
    assert (data.num_classes, data.image_size, len(data.test)) == (10, 8, 360)
    assert torch.bincount(data.test.labels).min() >= 34  # stratified: every digit has its tenth
    torch.manual_seed(99), np.random.seed(99)
    again = prepared(Digits())
    assert again.test.rows == data.test.rows  # whatever the run's seed
    batch = again.train.__getitems__(range(len(again.train)))
    pixels = batch["pixel_values"]
    assert pixels.shape == (1437, again.channels, 8, 8) == (1437, 1, 8, 8)
    assert (pixels.dtype, batch["labels"].dtype) == (torch.float32, torch.int64)
    assert (pixels.mean().item(), pixels.std().item()) == pytest.approx((0, 1), abs=0.02)


def test_a_batch_is_the_same_bits_as_its_samples_one_by_one(cifar10):
    resized = cifar10(image_size=224)
    indices = [4999, 0, 7, 1234, 8]
    at_once = resized.train.__getitems__(indices)
    singly = resized.collate([resized.train[i] for i in indices])
    assert at_once["pixel_values"].shape == (5, 3, 224, 224)
    assert all(torch.equal(at_once[key], singly[key]) for key in ("pixel_values", "labels"))


def test_fashion_mnist_reads_the_uncompressed_files_without_download(sample_data):
    root = str(sample_data / "fashion_mnist_small")
    data = prepared(FashionMNIST(root, download=False, val_fraction=0.1))
    assert [len(data.train), len(data.val), len(data.test)] == [900, 100, 500]
    assert torch.bincount(data.val.labels).tolist() == [10] * 10
    assert data.class_names[9] == "Ankle boot"
    image, label = torchvision.datasets.FashionMNIST(root, train=False)[17]
    expected = (torchvision.transforms.functional.to_tensor(image) - 0.2860) / 0.3530
    assert data.test[17]["labels"] == label
    torch.testing.assert_close(data.test[17]["pixel_values"], expected)
    pretrained = prepared(FashionMNIST(root, download=False, normalize="imagenet"))
    assert pretrained.test[17]["pixel_values"].shape == (pretrained.channels, 28, 28) == (3, 28, 28)


def test_cifar10_pixels_and_labels_are_those_of_the_png_files(sample_data, cifar10):
    data = cifar10()
    assert [len(data.train), data.val, len(data.test)] == [5000, None, 1000]
    with np.load(sample_data / "cifar10" / "cifar10_subset.npz", allow_pickle=False) as arrays:
        names = [str(name) for name in arrays["filenames"][5000:]]
    path = next((sample_data / "cifar10" / "folder" / "test" / "frog").iterdir())
    index = next(i for i, name in enumerate(names) if name.endswith(path.name))
    assert data.class_names[data.test[index]["labels"]] == "frog"
    assert torch.equal(data.test[index]["pixel_values"], data.load_image(path))


def test_only_training_images_are_augmented(cifar10):
    data = cifar10(augment="flip", val_fraction=0.1)
    assert [split.augmented for split in (data.train, data.val, data.test)] == [True, False, False]


@pytest.mark.parametrize("size", [8, 33])
@pytest.mark.parametrize("augment", ["none", "flip", "crop_flip"])
def test_pixels_are_those_of_torchvisions_own_transforms_and_draws(cifar10, augment, size):
    flip, crop = v2.RandomHorizontalFlip(), v2.RandomCrop(size, padding=size // 8, padding_mode="reflect")
    steps = {"none": [], "flip": [flip], "crop_flip": [crop, flip]}[augment]
    data = cifar10(augment=augment, image_size=size)
    resized = [v2.Resize(size, antialias=True), v2.CenterCrop(size)]
    scaled = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*data._mean_and_std)]
    transform = v2.Compose([*resized, *steps, *scaled])
    for seed in range(12):
        torch.manual_seed(seed)
        theirs, after = transform(data.train.images[seed]), torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(data.train[seed]["pixel_values"], theirs)
        assert torch.equal(torch.rand(1), after)  # no more and no fewer numbers are drawn


def test_a_micro_batch_is_made_at_once_unless_the_dataset_collates_itself(folder):
    class Own(ImageFolder):
        def collate(self, samples):
            assert all(sample["pixel_values"].dtype == torch.float32 for sample in samples)
            return {**super().collate(samples), "own": True}

    settings = {"augment": "crop_flip", "image_size": 32}
    plain, own = (prepared(kind(str(folder), **settings)) for kind in (ImageFolder, Own))
    asked = [Request([3, 0, 2], [5, 6, 7])]
    (batch,), (theirs,) = (list(Loader(data.train, data.collate)(asked)) for data in (plain, own))
    assert theirs.pop("own")
    assert batch.keys() == theirs.keys()
    assert all(torch.equal(batch[key], theirs[key]) and batch[key].dtype == theirs[key].dtype for key in batch)


def test_a_jpeg_has_the_bits_that_pil_gives_it_and_its_words_when_it_is_cut_off(sample_data, tmp_path):
    source = next((sample_data / "cifar10" / "folder" / "train").glob("*/*"))
    picture = Image.open(source).convert("RGB").resize((50, 37))
    for mode in ("RGB", "L", "CMYK"):
        path = tmp_path / f"{mode}.jpg"
        picture.convert(mode).save(path, quality=90, progressive=mode == "L")
        theirs = torchvision.transforms.functional.pil_to_tensor(Image.open(path).convert("RGB"))
        assert torch.equal(read_image(str(path), "RGB"), theirs)
    path.write_bytes((tmp_path / "RGB.jpg").read_bytes()[:-200])
    with pytest.raises(RecipeError, match=r"CMYK\.jpg cannot be read as an image \(OSError: image file is truncated"):
        read_image(str(path), "RGB")


def test_image_folder_reads_its_parts(folder):
    data = prepared(ImageFolder(str(folder), image_size=48))
    assert (len(data.train), data.val, len(data.test)) == (10, None, 6)
    assert data.class_names == ["cat", "ship"]
    assert data.train[9]["labels"] == 1
    assert data.train[9]["pixel_values"].shape == (3, 48, 48)
    assert data.train.describe(9).startswith(str(folder / "train" / "ship"))
    assert torch.equal(data.train[9]["pixel_values"], data.load_image(data.train.describe(9)))
    pixels = np.zeros((20, 60, 3), np.uint8)
    pixels[:, 20:40] = 255  # the centre square is white
    Image.fromarray(pixels).save(folder / "wide.png")
    image = ImageFolder(str(folder), image_size=20).load_image(folder / "wide.png")
    assert image.unique().numel() == 3  # one value a channel: it keeps its proportions


def test_parts_and_classes_that_do_not_fit_are_named(folder):
    shutil.copytree(folder / "test" / "cat", folder / "test" / "lynx")
    refused("train and test differ in lynx", ImageFolder(str(folder)))
    shutil.rmtree(folder / "test")
    refused(r"neither a test nor a val folder.*--data\.val_fraction", ImageFolder(str(folder)))
    data = prepared(ImageFolder(str(folder), val_fraction=0.4, augment="flip"))
    assert (len(data.train), len(data.val), data.test) == (6, 4, None)
    assert sorted(label for _, label in data.val.samples) == [0, 0, 1, 1]
    assert not {path for path, _ in data.val.samples} & {path for path, _ in data.train.samples}
    assert not data.val.augmented


def test_folders_that_people_have_are_read_or_said_how_they_must_be(folder):
    for part in ("train", "test"):  # Jupyter makes the first, and an eager click the second
        (folder / part / ".ipynb_checkpoints").mkdir()
        (folder / part / "cat" / ".ipynb_checkpoints").mkdir()
        shutil.copy(next((folder / part / "cat").glob("*.*")), folder / part / "cat" / ".ipynb_checkpoints")
    data = prepared(ImageFolder(str(folder)))
    assert (len(data.train), len(data.test), data.class_names) == (10, 6, ["cat", "ship"])
    flat = ImageFolder(str(folder / "train"))
    refused(r"neither a test nor a val folder.*--data\.val_fraction 0\.1", flat)
    data = prepared(ImageFolder(str(folder / "train"), val_fraction=0.4))
    assert (len(data.train), len(data.val), data.class_names) == (6, 4, ["cat", "ship"])
    for part in ("train", "test"):
        (folder / part / "empty").mkdir()
    refused(
        rf"{folder}/train/empty contains no images \(\.jpg .*remove the folder, or add images", ImageFolder(str(folder))
    )
    refused(r"train/cat contains no class folders: give one with train/CLASS", ImageFolder(str(folder / "train/cat")))
    for name in ("empty", "ship"):
        shutil.rmtree(folder / "train" / name)
    refused("has only the class folder 'cat', but a classifier needs two or more", ImageFolder(str(folder)))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_whatever_the_file_is_called(tmp_path, name):
    Image.new("RGB", (8, 8), (255, 0, 0)).save(tmp_path / "x.png", format=name)
    assert read_image(str(tmp_path / "x.png"), "RGB").float().mean((1, 2)).tolist() == pytest.approx([255, 0, 0], abs=2)


def test_a_corrupt_image_and_a_truncated_one_are_named_before_training(folder):
    broken = sorted((folder / "test" / "ship").iterdir())[1]
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1  # one flipped bit
    broken.write_bytes(content)
    refused(f"1 of 16 images cannot be read: {broken}", ImageFolder(str(folder)))
    cut = folder / "train" / "cat" / "zz.jpg"
    Image.open(min((folder / "train" / "cat").iterdir())).save(cut)
    cut.write_bytes(cut.read_bytes()[:-200])
    refused(f"2 of 17 images cannot be read: {cut} .*; {broken}", ImageFolder(str(folder)))


def test_sound_files_are_read_once_and_faults_looked_at_again(folder, tmp_path, monkeypatch, settled):
    read, check = [], arrays._check
    monkeypatch.setattr(arrays, "_check", lambda path: (read.append(path), check(path))[1])
    images = sorted(folder.rglob("*.png"))
    data = ImageFolder(str(folder), cache_dir=str(tmp_path / "cache"))
    splits = [prepared(data).train.fingerprint() for _ in range(2)]  # two ranks, or two runs
    assert sorted(read) == images
    assert splits[0] == splits[1]
    images[0].write_bytes(b"broken")
    for _ in range(2):
        read.clear()
        refused(f"1 of {len(images)} images cannot be read: {images[0]}", data)
        assert len(read) == len(images)


def test_missing_files_say_where_they_were_looked_for_and_could_not_be_fetched_from(tmp_path, monkeypatch):
    said = rf"{tmp_path}/FashionMNIST/raw: set --data\.download true"
    refused(said, FashionMNIST(str(tmp_path), download=False))
    refused(rf"{tmp_path}/cifar-10-batches-py: set --data\.download true", CIFAR10(str(tmp_path), download=False))
    refused(f"no file {tmp_path}/none.npz", CIFAR10(str(tmp_path / "none.npz")))
    refused(f"no folder {tmp_path}/none: give one with train/CLASS", ImageFolder(str(tmp_path / "none")))
    nowhere = "http://127.0.0.1:9/"  # the discard port: nothing listens
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", [nowhere])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", nowhere)
    for source in (FashionMNIST, CIFAR10):
        refused(rf"could not be downloaded from {nowhere} .*check the network", source(str(tmp_path)))


def test_a_broken_npz_and_one_that_comes_to_more_than_the_memory_are_refused(sample_data, tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    path.write_bytes((sample_data / "cifar10" / "cifar10_subset.npz").read_bytes()[:100_000])
    refused(f"{path} cannot be read", CIFAR10(str(path)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("images.npy", b"")
    written = bytearray(path.read_bytes())
    at = written.index(b"PK\x01\x02")  # the directory's entry says how large the file becomes
    written[at + 24 : at + 28] = (0xFFFFFFFE).to_bytes(4, "little")
    path.write_bytes(written)
    monkeypatch.setattr("trainer.data.images.available_bytes", lambda: 2**32 - 1000)
    refused(r"bomb\.npz needs 4\.3 GB, but this machine has 4\.3 GB free", CIFAR10(str(path)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Digits(augment="randaug"),
            r"data\.augment='randaug' is not one of none, flip, crop_flip, randaugment",
        ),
        (lambda: Digits(augment="flip", mirror=False), r"data\.mirror=false disables all of data\.augment=flip"),
        (
            lambda: Digits(random_resized_crop=1.5),
            r"data\.random_resized_crop=1\.5 must be a number from 0 to 1; null is off",
        ),
        (lambda: Digits(random_resized_crop=0), r"data\.random_resized_crop=0 would be an empty image"),
        (lambda: Digits(erasing=-0.1), r"data\.erasing=-0\.1 must be a number from 0 to 1; 0 is off"),
        (lambda: Digits(color_jitter="0.4"), r"data\.color_jitter='0\.4' must be a number"),
        (
            lambda: Digits(transform="my.function"),
            r"transform='my\.function' is not a function: give one in a Python recipe",
        ),
        (lambda: Digits(image_size=0), r"data\.image_size=0"),
        (lambda: Digits(test_fraction=0.0), r"data\.test_fraction=0\.0"),
        (lambda: CIFAR10(val_fraction=1.0), r"data\.val_fraction=1\.0"),
        (lambda: CIFAR10(augment="mixup"), r"data\.augment='mixup' is not one of none, flip, crop_flip"),
        (lambda: ImageFolder("x", workers=-1), r"data\.workers=-1"),
    ],
)
def test_settings_that_cannot_work_are_refused(build, message):
    with pytest.raises(RecipeError, match=message):
        build()


# Splits

LABELS = st.lists(st.integers(0, 4), min_size=6, max_size=90)


@settings(max_examples=60)
@given(labels=LABELS, fraction=st.floats(0.02, 0.98), seed=st.integers(0, 1000))
def test_the_split_is_that_of_scikit_learn(labels, fraction, seed):
    try:
        parts = train_test_split(range(len(labels)), test_size=fraction, random_state=seed, stratify=labels)
    except ValueError:
        with pytest.raises(RecipeError, match=r"data\.val_fraction=.*(one sample|would have)"):
            hold_out(labels, fraction, "data.val_fraction", seed)
    else:
        assert hold_out(labels, fraction, "data.val_fraction", seed) == tuple(map(sorted, parts))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_digits_are_those_of_scikit_learn(elsewhere, monkeypatch):
    if elsewhere:
        monkeypatch.setattr("trainer.data.image_splits.find_spec", lambda name: None)
    digits = load_digits()
    pixels, classes = read_digits()
    assert np.array_equal(pixels, digits.images)
    assert np.array_equal(classes, digits.target)


# Augmentation: torchvision's transforms with its draws, the same for any workers and cut

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
