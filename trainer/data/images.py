"""Image datasets. Every batch is ``pixel_values`` float32 ``(n, channels, H, W)`` and ``labels`` int64 ``(n,)``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple
from zipfile import BadZipFile, ZipFile

from trainer.contract import Model, Preparable, capability
from trainer.data.base import IMAGES, ClassWeightedDataset, hold_out, local_path, require_fraction, root_cause
from trainer.errors import RecipeError, format_list, require, require_choice, require_positive
from trainer.system.machine import available_bytes
from trainer.values import DataSpec, ImageInput, MixupConfig

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.data.image_splits import ImageTransform

MAX_MIXUP_ALPHA = 1000  # above it, all shares are close to 1/2
DEFAULT_IMAGE_SIZE = 224
MAX_IMAGE_SIZE = 20_000  # per side: one such image is 5 GB
Augment = Literal["none", "flip", "crop_flip", "randaugment", "autoaugment", "trivialaugment"]
Normalize = Literal["dataset", "imagenet", "model"]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]
IMAGENET_MEAN_STD: Statistics = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as torchvision's pretrained models


class _ImageArraysPart(NamedTuple):
    images: Tensor  # uint8 (n, channels, H, W)
    labels: Tensor  # int64 (n,)
    source: str
    rows: Sequence[int]


@dataclass(kw_only=True)
class Augmentation:
    """Random changes of training images. The draws depend only on seed, epoch and sample.

    The order is transform, random_resized_crop, augment, color_jitter, erasing.

    Args:
        augment: none, flip (mirrored with probability 1/2), crop_flip (also shifted by up to 1/8 of the size, with a
            reflected border); or mirrored with probability 1/2, followed by torchvision's randaugment (Cubuk et al.
            2020), autoaugment (Cubuk et al. 2019, ImageNet policy) or trivialaugment (Müller and Hutter 2021).
        mirror: whether augment mirrors; set false for digits, letters and other images where left and right differ.
        random_resized_crop: use a random part of the image instead of the centre square, with at least this share of
            its area and an aspect ratio of 3:4 to 4:3, resized (Szegedy et al. 2015); 0.08 is usual for training from
            random weights, null is off.
        color_jitter: change brightness, contrast and saturation by factors of up to 1 plus or minus this.
        erasing: probability that a rectangle of 2 to 33 % of the image is filled with grey (Zhong et al. 2017).
        transform: a custom function in a Python recipe, from the uint8 image as read (channels, height, width) to its
            replacement. It may draw from the global generators of torch, NumPy and random.
        mixup: mix every training image, and its label, with another one of its batch (Zhang et al. 2018). The share
            is drawn from a beta distribution with both parameters equal to this; 0.2 and 0.8 are usual, 0 is off.
        cutmix: paste a rectangle of another image of its batch into every training image and mix the labels by area
            (Yun et al. 2019); 1.0 is usual, 0 is off. With mixup, each batch draws one of the two.
        mix_probability: probability that a batch is mixed.
    """

    augment: Augment = "none"
    mirror: bool = True
    random_resized_crop: float | None = None
    color_jitter: float = 0.0
    erasing: float = 0.0
    transform: Callable[[Tensor], Tensor] | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0

    def mixup_config(self) -> MixupConfig | None:
        """Return the settings of mixup and CutMix, or ``None`` if both are off."""
        return MixupConfig(self.mixup, self.cutmix, self.mix_probability) if self.mixup or self.cutmix else None

    def _require_augmentation(self) -> None:
        require_choice("data.augment", self.augment, Augment)
        changes = self.mirror or self.augment != "flip"
        require(changes, "data.mirror=false disables all of data.augment=flip: use data.augment none")
        for name in ("color_jitter", "erasing", "mix_probability"):
            require_fraction(f"data.{name}", getattr(self, name))
        if self.random_resized_crop is not None:
            require_fraction("data.random_resized_crop", self.random_resized_crop, "null")
            require(self.random_resized_crop > 0, "data.random_resized_crop=0 would be an empty image: null is off")
        for name in ("mixup", "cutmix"):
            require_fraction(f"data.{name}", getattr(self, name), most=MAX_MIXUP_ALPHA)
        unused = f"data.mix_probability={self.mix_probability} has no effect without data.mixup or data.cutmix"
        is_used = self.mix_probability == 1 or self.mixup_config() is not None
        require(is_used, f"{unused}: set one, such as data.mixup 0.2")
        wrong, fix = f"data.transform={self.transform!r} is not a function", "transform=my_function"
        require(self.transform is None or callable(self.transform), f"{wrong}: give one in a Python recipe, {fix}")


class _ImageDataset(Augmentation, ClassWeightedDataset):
    """Base class of image datasets.

    Args:
        image_size: height and width that images are resized to, in pixels.
        val_fraction: share of the training images held out for validation; always the same images.
        normalize: normalise by mean and standard deviation of dataset (this dataset), imagenet (which most pretrained
            models expect), or model (its training images; imagenet if the model does not specify them).
    """

    image_size: int | None
    normalize: Normalize = "imagenet"

    _asked: tuple[Any, ImageInput | None] = (None, None)
    _statistics: ClassVar[Statistics] = IMAGENET_MEAN_STD
    _mode: ClassVar[str] = "RGB"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is not None:
            require_positive("data.image_size", self.image_size, MAX_IMAGE_SIZE)
        self._require_augmentation()
        require_choice("data.normalize", self.normalize, Normalize)

    def load_image(self, path: str | Path) -> Tensor:
        """Read any image file as in evaluation: float32 ``(channels, image_size, image_size)``."""
        from trainer.data.image_splits import read_image

        return self._transform()(read_image(str(path), self._mode))

    @property
    def channels(self) -> int:  # type: ignore[override]
        """Channels of a sample: 3 for colour, and for grey normalised by ImageNet's three; otherwise 1."""
        return len(self._mean_and_std[0])

    @property
    def _mean_and_std(self) -> Statistics:
        seen = self._pretrained_input() if self.normalize == "model" else None
        if seen is not None and seen.mean and seen.std:
            return seen.mean, seen.std
        return self._statistics if self.normalize == "dataset" else IMAGENET_MEAN_STD

    def _pretrained_input(self) -> ImageInput | None:
        """Return the format of the model's training images, which it reads from files."""
        if self._asked[0] is not self._model:
            seen = None if self._model is None else capability(self._model, Preparable).image_input()
            self._asked = self._model, seen
        return self._asked[1]

    def _transform(self, augmented: bool = False) -> ImageTransform:
        from trainer.data.image_splits import ImageTransform

        if self.image_size is None:
            seen = self._pretrained_input()
            self.image_size = seen.size if seen is not None and seen.size else DEFAULT_IMAGE_SIZE
        return ImageTransform(self.image_size, *self._mean_and_std, self if augmented else Augmentation())

    def _set_splits(self, train: _ImageArraysPart, test: _ImageArraysPart) -> None:
        from trainer.data.image_splits import ImageArrays

        labels = train.labels.tolist()
        parts = self._hold_out([labels[row] for row in train.rows])
        chosen, others = ([train.rows[i] for i in part] for part in parts)
        self.train = ImageArrays(*train._replace(rows=chosen), self._transform(augmented=True))
        self.val = ImageArrays(*train._replace(rows=others), self._transform()) if others else None
        self.test = ImageArrays(*test, self._transform())


@dataclass
class Digits(_ImageDataset):
    """scikit-learn's handwritten digits: 1,797 real grey images of 8 × 8 pixels, without a download.

    Args:
        test_fraction: share of all images held out as the test set; always the same images.
        val_fraction: share of the remaining images held out for validation; always the same images.
    """

    image_size: int = 8
    test_fraction: float = 0.2

    _statistics = (0.3053,), (0.3760,)
    _mode = "L"
    normalize = "dataset"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.test_fraction < 1:
            raise RecipeError(f"data.test_fraction={self.test_fraction} must be more than 0 and less than 1")

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        self.use_model(model)
        import torch

        from trainer.data.image_splits import read_digits

        pixels, labels = map(torch.from_numpy, read_digits())
        images = (pixels * (255 / 16)).round().to(torch.uint8)[:, None]
        self._set_classes([str(number) for number in range(10)])
        rows = hold_out(labels.tolist(), self.test_fraction, "data.test_fraction")
        self._set_splits(*(_ImageArraysPart(images, labels, "scikit-learn digits", part) for part in rows))


@dataclass
class _DownloadedImages(_ImageDataset):
    """Base class of public image datasets. ``_read`` returns the classes, and images and labels of train and test."""

    root: str = "data"
    download: bool = True
    image_size: int = 32
    normalize: Normalize = "imagenet"
    workers: int | None = field(default=None, kw_only=True)

    _place: ClassVar[str]  # path of the files in ``root``
    _counts: ClassVar[tuple[int, int]]  # number of samples of train and test

    def spec(self) -> DataSpec | None:
        if not self.download or self.root.endswith(".npz") or (local_path(self.root) / self._place).is_dir():
            return None
        shape = (self.channels, self.image_size, self.image_size)
        return self._make_spec(*self._counts, 10, {"pixel_values": ("float32", shape)})

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        self.use_model(model)
        classes, train, test = self._read()
        self._set_classes(classes)
        name, splits = type(self).__name__, (("train", train), ("test", test))
        parts = [(*part, f"{name} {split}", range(len(part[1]))) for split, part in splits]
        self._set_splits(*map(_ImageArraysPart._make, parts))

    def _read(self) -> tuple[Sequence[str], Any, Any]:
        raise NotImplementedError

    def _open(self, source: Callable[..., Any], folder: Path, url: str) -> list[Any]:
        """Create a torchvision dataset for train and test. A failure becomes an error with a fix."""
        try:
            return [source(str(local_path(self.root)), train=train, download=self.download) for train in (True, False)]
        except Exception as error:  # RuntimeError, OSError, URLError; readers of broken files raise others
            advice = f"not found, or not readable, in {folder}: set --data.download true, or data.root to its folder"
            if self.download:
                fix = "check the network, or copy the files there from another machine, and delete broken files"
                advice = f"could not be downloaded from {url} to {folder}, or not be read there: {fix}"
            name = type(self).__name__
            raise RecipeError(f"data.root={self.root!r}: {name} {advice} ({root_cause(error)})") from error


@dataclass
class FashionMNIST(_DownloadedImages):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothing, grey, 28 × 28 pixels.

    Args:
        root: folder that contains, or gets by download, FashionMNIST/raw with the four idx files.
        download: download the files (30 MB) if they are missing.
    """

    image_size: int = 28
    normalize: Normalize = "dataset"

    _statistics = (0.2860,), (0.3530,)
    _mode = "L"
    _place, _counts = "FashionMNIST/raw", (60_000, 10_000)

    def _read(self) -> tuple[Sequence[str], Any, Any]:
        from torch import Tensor, uint8
        from torchvision.datasets import FashionMNIST as Source

        folder = local_path(self.root) / self._place
        train, test = self._open(Source, folder, Source.mirrors[0])
        for part in (train, test):  # files of an old torchvision are loaded without a check
            images, labels = part.data, part.targets
            fits = isinstance(images, Tensor) and isinstance(labels, Tensor) and images.dtype == uint8
            fits = fits and images.ndim == 3 and labels.shape == images.shape[:1]
            wrong = f"data.root: {folder.parent} contains no grey images with labels"
            require(fits, f"{wrong}: delete it to download it again")
        return Source.classes, *((part.data[:, None], part.targets.long()) for part in (train, test))


@dataclass
class CIFAR10(_DownloadedImages):
    """CIFAR-10: 50,000 training and 10,000 test images of animals and vehicles, 32 × 32 pixels.

    Args:
        root: folder that contains, or gets by download, cifar-10-batches-py; or an .npz file with images (uint8, n ×
            32 × 32 × 3), labels, split (0 train, 1 test) and class_names.
        download: download the files (170 MB) if they are missing; torchvision checks their MD5 before every run.
    """

    _statistics = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    _place, _counts = "cifar-10-batches-py", (50_000, 10_000)

    def _read(self) -> tuple[Sequence[str], Any, Any]:
        import torch

        if self.root.endswith(".npz"):
            names, *found = _read_npz(local_path(self.root))
        else:
            from torchvision.datasets import CIFAR10 as Source

            sources = self._open(Source, local_path(self.root) / self._place, Source.url)
            names, found = sources[0].classes, [(source.data, source.targets) for source in sources]
        tensors = ((torch.from_numpy(images).permute(0, 3, 1, 2), torch.as_tensor(labels)) for images, labels in found)
        train, test = ((images.contiguous(), labels.long()) for images, labels in tensors)
        return names, train, test


@dataclass
class ImageFolder(_ImageDataset):
    """Custom images: ROOT/train/CLASS/*.png, and the same for test and val; the folder names are the classes.

    ROOT/CLASS/*.png also works, with a val_fraction. Hidden files and folders are ignored. Images are resized by their
    shorter side, cropped to the centre square and normalised. Every file is checked before training begins.

    Args:
        root: folder that contains train, and val or test or both; or the class folders themselves.
        image_size: height and width of the images after resizing, in pixels; null takes the size of the model's
            training images, or 224.
        val_fraction: share of the training images held out for validation if there is no val folder.
        cache_dir: folder of the cache of checked files; by default that of the datasets library.
    """

    root: str
    image_size: int | None = None
    normalize: Normalize = "model"
    cache_dir: str | None = None
    workers: int | None = field(default=None, kw_only=True)

    def require_files(self) -> None:
        self._list()

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        from trainer.data.cache import cache_folder
        from trainer.data.image_splits import ImageFiles, check_images

        self.use_model(model)
        files = self._list()
        paths = [path for samples in files.values() for path, _ in samples]
        checked = check_images(paths, self.max_bad_samples, cache_folder(self.cache_dir))
        kept, held = self._hold_out([label for _, label in files["train"]])
        if held:
            files["val"] = [files["train"][i] for i in held]
        files["train"] = [files["train"][i] for i in kept]
        for part, samples in files.items():
            setattr(self, part, ImageFiles(samples, self._transform(augmented=part == "train"), checked))

    def _list(self) -> dict[str, list[tuple[str, int]]]:
        """Return the files of every part and their classes. Sets ``class_names`` and ``num_classes``."""
        key, root = f"data.root={self.root!r}", local_path(self.root)
        wanted = "give one with train/CLASS/*.jpg and test/CLASS/*.jpg by --data.root FOLDER, or one with CLASS/*.jpg"
        require(root.is_dir(), f"{key}: there is no folder {root}: {wanted} and --data.val_fraction 0.1")
        folders = {part: root / part for part in ("train", "val", "test") if (root / part).is_dir()} or {"train": root}
        require("train" in folders, f"{key}: there is no folder {root / 'train'}: {wanted}")
        found = {part: _folders_in(folder) for part, folder in folders.items()}
        require(bool(found["train"]), f"{key}: {folders['train']} contains no class folders: {wanted}")
        cause = f"{key} contains neither a test nor a val folder"
        if len(found) == 1 and self.val_fraction == 0:
            raise RecipeError(f"{cause}: add one, or hold out part of the training images with --data.val_fraction 0.1")
        both = f"data.val_fraction={self.val_fraction} and the folder {root / 'val'}"
        require("val" not in found or self.val_fraction == 0, f"{both} exclude each other: set it to 0")
        self._set_classes(found["train"])
        only = f"{key}: {folders['train']} has only the class folder {self.class_names[0]!r}"
        require(self.num_classes > 1, f"{only}, but a classifier needs two or more: add a folder for each class")
        index, samples = {name: number for number, name in enumerate(self.class_names)}, {}
        for part, folder in folders.items():
            differing = ", ".join(sorted(set(found[part]) ^ set(self.class_names)))
            differ = f"{key}: the classes of train and {part} differ in {differing}"
            require(not differing, f"{differ}: every class needs a folder with images in both")
            samples[part] = [(path, label) for name, label in index.items() for path in _images_in(folder / name)]
            empty = sorted(index.keys() - {self.class_names[label] for _, label in samples[part]})
            cause = f"{key}: {folder / format_list(empty)} contains no images ({' '.join(IMAGES)})"
            require(not empty, f"{cause}: remove the folder, or add images")
        return samples


def _images_in(folder: Path) -> Iterator[str]:
    """Yield the paths of the images in ``folder`` in the order of torchvision's ImageFolder, without hidden ones."""
    for place, _, names in sorted(os.walk(folder, followlinks=True)):
        for path in (os.path.join(place, name) for name in sorted(names)):
            if path.lower().endswith(IMAGES) and "/." not in path.removeprefix(str(folder)):
                yield path


def _folders_in(folder: Path) -> list[str]:
    """Return the sorted names of the folders in ``folder``, except hidden ones such as Jupyter's."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _read_npz(path: Path) -> tuple[list[str], tuple[Any, Any], tuple[Any, Any]]:
    import numpy as np

    require(path.is_file(), f"data.root: there is no file {path}")
    _require_disk_or_memory(path)
    keys = ("images", "labels", "split", "class_names")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels, split, names = found = [arrays[key] for key in keys]
    except Exception as error:  # errors of zip and zlib, KeyError and ValueError, all for an invalid file
        cause = f"data.root: {path} cannot be read ({root_cause(error)})"
        raise RecipeError(f"{cause}: it needs images, labels, split and class_names") from error
    for key, array in zip(keys, found, strict=True):
        require(isinstance(array, np.ndarray), f"data.root: {key} in {path} is not an array")
    lists = labels.ndim == split.ndim == names.ndim == 1 and labels.dtype.kind in "iu"
    require(lists, f"data.root: labels, split and class_names in {path} must be lists, labels of integers")
    shape, kind = images.shape, images.dtype
    fits = kind == np.uint8 and images.ndim == 4 and shape[3] == 3 and 0 not in shape[1:]
    require(fits, f"data.root: images in {path} are {kind} {shape}, not uint8 (n, height, width, 3)")
    fits = len(images) == len(labels) == len(split)
    fits = fits and int(labels.min(initial=0)) >= 0 and int(labels.max(initial=0)) < len(names)
    require(fits, f"data.root: images, labels, split and class_names in {path} do not match each other")
    labels = labels.astype(np.int64)  # torch needs the native byte order
    train, test = ((images[split == part], labels[split == part]) for part in (0, 1))
    require(len(train[0]) > 0 and len(test[0]) > 0, f"data.root: {path} needs rows with split 0 (train) and 1 (test)")
    return [str(name) for name in names], train, test


def _require_disk_or_memory(path: Path) -> None:
    """Check the unpacked size in the zip directory, because a zip file of kilobytes may expand to terabytes."""
    try:
        with ZipFile(path) as file:
            size = sum(entry.file_size for entry in file.infolist())
    except (BadZipFile, ValueError, OSError):  # the reader reports it
        return
    free = available_bytes()
    needed = f"data.root: {path} needs {size / 1e9:.1f} GB, but this machine has {free / 1e9:.1f} GB free"
    require(size < free, f"{needed}: use a folder of images")
