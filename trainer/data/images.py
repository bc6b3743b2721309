"""Image datasets. Every batch is ``pixel_values`` float32 ``(n, channels, H, W)`` and ``labels`` int64 ``(n,)``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from zipfile import BadZipFile, ZipFile

from trainer.contract import Data
from trainer.data.common import check_loading, hold_out, local_path, reason, require_fraction
from trainer.errors import RecipeError, require, require_choice, require_positive
from trainer.system.machine import available_bytes

if TYPE_CHECKING:
    from numpy import ndarray
    from torch import Tensor

    from trainer.data.arrays import Pixels

MOST_PIXELS = 20_000
"""Along an edge: one such image is 5 GB."""

Augment = Literal["none", "flip", "crop_flip"]
Normalize = Literal["dataset", "imagenet"]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]

IMAGENET: Statistics = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel: what torchvision's pretrained models expect."""


class _Images(Data):
    """What the image datasets share: the checks, the transform and a single file read through it."""

    image_size: int
    num_classes: int
    class_names: list[str]
    augment: Augment = "none"
    normalize: Normalize = "imagenet"

    _statistics: ClassVar[Statistics] = IMAGENET
    _mode: ClassVar[str] = "RGB"

    def __post_init__(self) -> None:
        require_positive("data.image_size", self.image_size, MOST_PIXELS)
        require_fraction("data.val_fraction", getattr(self, "val_fraction", 0.0))
        require_choice("data.augment", self.augment, Augment)
        require_choice("data.normalize", self.normalize, Normalize)
        check_loading(self)

    def load_image(self, path: str | Path) -> Tensor:
        """Read any image file as the evaluation sees it: float32 ``(channels, image_size, image_size)``.

        Raises:
            RecipeError: naming the file when it cannot be read.
        """
        from trainer.data.arrays import read_image

        return self._pixels("none")(read_image(str(path), self._mode))

    @property
    def channels(self) -> int:
        """Channels of a sample: 3 when colour, or grey that is normalised by ImageNet's three; else 1."""
        return len(self._mean_and_std()[0])

    def _mean_and_std(self) -> Statistics:
        return IMAGENET if self.normalize == "imagenet" else self._statistics

    def _pixels(self, augment: str) -> Pixels:
        from trainer.data.arrays import Pixels

        return Pixels(self.image_size, *self._mean_and_std(), augment)

    def _set_classes(self, names: Sequence[str]) -> None:
        self.class_names = list(names)
        self.num_classes = len(self.class_names)

    def _split(self, images: Tensor, labels: Tensor, augment: str, source: str, rows: Sequence[int]) -> Any:
        from trainer.data.arrays import ImageArrays

        return ImageArrays(images, labels, self._pixels(augment), source, rows)

    def _set_splits(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], val_fraction: float) -> None:
        """Take ``val`` out of the training images and wrap the three."""
        kept, held = hold_out(train[1].tolist(), val_fraction, "data.val_fraction")
        name = type(self).__name__
        self.train = self._split(*train, self.augment, f"{name} train", kept)
        self.val = self._split(*train, "none", f"{name} train", held) if held else None
        self.test = self._split(*test, "none", f"{name} test", range(len(test[1])))


@dataclass
class Digits(_Images):
    """scikit-learn's handwritten digits: 1,797 real grey images of 8 × 8 pixels, with no download.

    Args:
        image_size: height and width that images are resized to, in pixels.
        test_fraction: share of all images held out as the test set; always the same images.
        val_fraction: share of the remaining images held out for validation; always the same images.
        workers: processes that load data; 0 loads in the main process.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    image_size: int = 8
    test_fraction: float = 0.2
    val_fraction: float = 0.0
    workers: int = 0
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    _statistics = (0.3053,), (0.3760,)
    _mode = "L"
    normalize = "dataset"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("data.test_fraction", self.test_fraction, zero=False)

    def prepare(self, tokenizer: Any = None) -> None:
        """Read the images from scikit-learn's files and split them."""
        import torch

        from trainer.data.splits import read_digits

        pixels, labels = map(torch.from_numpy, read_digits())
        images = (pixels * (255 / 16)).round().to(torch.uint8)[:, None]
        self._set_classes([str(number) for number in range(10)])
        rest, test = hold_out(labels.tolist(), self.test_fraction, "data.test_fraction")
        kept, held = hold_out(labels[rest].tolist(), self.val_fraction, "data.val_fraction")
        self.train = self._split(images, labels, self.augment, "scikit-learn digits", [rest[i] for i in kept])
        self.val = self._split(images, labels, "none", "scikit-learn digits", [rest[i] for i in held]) if held else None
        self.test = self._split(images, labels, "none", "scikit-learn digits", test)


@dataclass
class FashionMNIST(_Images):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothing, grey, 28 × 28 pixels.

    Args:
        root: folder that holds, or gets by download, FashionMNIST/raw with the four idx files.
        download: fetch the files (30 MB) when they are not there.
        image_size: height and width that images are resized to, in pixels.
        val_fraction: share of the training images held out for validation; always the same images.
        augment: random changes of training images: none, flip (mirrored half of the time) or crop_flip (also shifted
            by up to 1/8 of the size, the border reflected).
        normalize: subtract and divide by the mean and standard deviation of this dataset, or of imagenet.
        workers: processes that load data; 0 loads in the main process, null is up to 4 a rank on a GPU, and else 0.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    root: str = "data"
    download: bool = True
    image_size: int = 28
    val_fraction: float = 0.0
    augment: Augment = "none"
    normalize: Normalize = "dataset"
    workers: int | None = None
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    _statistics = (0.2860,), (0.3530,)
    _mode = "L"

    def prepare(self, tokenizer: Any = None) -> None:
        """Download if asked to, and read all images.

        Raises:
            RecipeError: when the files are missing, broken or cannot be downloaded.
        """
        from torchvision.datasets import FashionMNIST as Source

        folder = local_path(self.root) / "FashionMNIST" / "raw"
        train, test = (_open(Source, self, train, folder, Source.mirrors[0]) for train in (True, False))
        _require_grey(train, test, str(folder.parent))
        self._set_classes(Source.classes)
        train, test = ((part.data[:, None], part.targets.long()) for part in (train, test))
        self._set_splits(train, test, self.val_fraction)


@dataclass
class CIFAR10(_Images):
    """CIFAR-10: 50,000 training and 10,000 test images of animals and vehicles, 32 × 32 pixels.

    The public download is read by torchvision, which checks the MD5 of every file before it reads it.

    Args:
        root: folder that holds, or gets by download, cifar-10-batches-py; or an .npz file with images (uint8, n × 32 ×
            32 × 3), labels, split (0 train, 1 test) and class_names.
        download: fetch the files (170 MB) when they are not there.
        image_size: height and width that images are resized to, in pixels.
        val_fraction: share of the training images held out for validation; always the same images.
        augment: random changes of training images: none, flip (mirrored half of the time) or crop_flip (also shifted
            by up to 1/8 of the size, the border reflected).
        normalize: subtract and divide by the mean and standard deviation of this dataset, or of imagenet, which
            pretrained models expect.
        workers: processes that load data; 0 loads in the main process, null is up to 4 a rank on a GPU, and else 0.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    root: str = "data"
    download: bool = True
    image_size: int = 32
    val_fraction: float = 0.0
    augment: Augment = "none"
    normalize: Normalize = "imagenet"
    workers: int | None = None
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    _statistics = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def prepare(self, tokenizer: Any = None) -> None:
        """Download if asked to, and read all images.

        Raises:
            RecipeError: when the files are missing, broken or cannot be downloaded.
        """
        if self.root.endswith(".npz"):
            names, train, test = _read_npz(local_path(self.root))
        else:
            names, train, test = self._read_batches()
        self._set_classes(names)
        self._set_splits(_channels_first(*train), _channels_first(*test), self.val_fraction)

    def _read_batches(self) -> tuple[list[str], tuple[Any, Any], tuple[Any, Any]]:
        from torchvision.datasets import CIFAR10 as Source

        folder = local_path(self.root) / Source.base_folder
        train, test = (_open(Source, self, train, folder, Source.url) for train in (True, False))
        return train.classes, (train.data, train.targets), (test.data, test.targets)


@dataclass
class ImageFolder(_Images):
    """Images of one's own: ROOT/train/CLASS/*.png, and so for test and val; the folder names are the classes.

    Images are resized by their shorter side, cut to the centre square and normalised by ImageNet's mean and standard
    deviation, which pretrained models expect. Every file is opened and checked before training begins.

    Args:
        root: folder that holds train, and also val or test, or both.
        image_size: height and width of the images after resizing, in pixels.
        val_fraction: share of the training images held out for validation when there is no val folder.
        augment: random changes of training images: none, flip (mirrored half of the time) or crop_flip (also shifted
            by up to 1/8 of the size, the border reflected).
        cache_dir: folder that remembers which files were found sound; by default that of the datasets library.
        workers: processes that load data; 0 loads in the main process, null is up to 4 a rank on a GPU, and else 0.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    root: str
    image_size: int = 224
    val_fraction: float = 0.0
    augment: Augment = "none"
    cache_dir: str | None = None
    workers: int | None = None
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    def prepare(self, tokenizer: Any = None) -> None:
        """List and check the files.

        Raises:
            RecipeError: for missing folders, classes that differ between the parts, and broken images.
        """
        from trainer.data.arrays import ImageFiles, check_images
        from trainer.data.cache import cache_folder

        found = {part: samples for part in ("train", "val", "test") if (samples := self._list(part)) is not None}
        self._check_parts(found)
        paths = [path for _, samples in found.values() for path, _ in samples]
        checked = check_images(paths, self.max_bad_samples, cache_folder(self.cache_dir))
        self._set_classes(found["train"][0])
        files = {part: samples for part, (_, samples) in found.items()}
        labels = [label for _, label in files["train"]]
        kept, held = hold_out(labels, self.val_fraction, "data.val_fraction")
        if held:
            files["val"] = [files["train"][i] for i in held]
        self.train = ImageFiles([files["train"][i] for i in kept], self._pixels(self.augment), checked)
        self.val, self.test = (
            ImageFiles(files[part], self._pixels("none"), checked) if part in files else None
            for part in ("val", "test")
        )

    def _list(self, part: str) -> tuple[list[str], list[tuple[str, int]]] | None:
        from torchvision.datasets import ImageFolder as Source

        folder = local_path(self.root) / part
        if not folder.is_dir():
            return None
        try:
            source = Source(str(folder))
        except FileNotFoundError as error:  # no class folder, or one without images
            raise RecipeError(f"data.root={self.root!r}: {folder}: {error}") from error
        return source.classes, source.samples

    def _check_parts(self, found: dict[str, Any]) -> None:
        root = local_path(self.root)
        require(
            "train" in found, f"data.root={self.root!r}: there is no folder {root / 'train'}; images go to train/CLASS"
        )
        require(
            len(found) > 1 or self.val_fraction > 0,
            f"data.root={self.root!r} holds neither a test nor a val folder: add one, or hold out part of the training "
            "images with --data.val_fraction 0.1",
        )
        require(
            "val" not in found or self.val_fraction == 0,
            f"data.val_fraction={self.val_fraction} and the folder {root / 'val'} exclude each other: set it to 0",
        )
        for part, (names, _) in found.items():
            differing = sorted(set(names) ^ set(found["train"][0]))
            require(
                not differing,
                f"data.root={self.root!r}: the classes of train and {part} differ in {', '.join(differing)}: "
                "every class needs a folder, with images, in both",
            )


def _open(source: Callable[..., Any], data: FashionMNIST | CIFAR10, train: bool, folder: Path, url: str) -> Any:
    """Call a torchvision dataset and say what to do when it fails."""
    try:
        return source(str(local_path(data.root)), train=train, download=data.download)
    except Exception as error:  # RuntimeError, OSError, URLError; and whatever a broken file makes its reader raise
        name = type(data).__name__
        if not data.download:
            advice = f"not found, or not readable, in {folder}: set --data.download true, or data.root to where it is"
        else:
            advice = (
                f"could not be downloaded from {url} to {folder}, or not read there: check the network; or copy the "
                "files there from another machine; delete broken ones"
            )
        raise RecipeError(f"data.root={data.root!r}: {name} {advice} ({reason(error)})") from error


def _require_grey(train: Any, test: Any, folder: str) -> None:
    """Where there are files of an old torchvision, it takes whatever tensors are in them."""
    from torch import Tensor, uint8

    for part in (train, test):
        fits = isinstance(part.data, Tensor) and isinstance(part.targets, Tensor)
        fits = fits and part.data.dtype == uint8 and part.data.ndim == 3 and part.targets.shape == part.data.shape[:1]
        require(fits, f"data.root: {folder} holds no grey images with labels: delete it to have it downloaded again")


def _read_npz(path: Path) -> tuple[list[str], tuple[Any, Any], tuple[Any, Any]]:
    import numpy as np

    require(path.is_file(), f"data.root: there is no file {path}")
    _require_room(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels, split, names = (arrays[key] for key in ("images", "labels", "split", "class_names"))
    except Exception as error:  # zip, zlib, KeyError and ValueError, all for a file that is not what it should be
        raise RecipeError(
            f"data.root: {path} cannot be read ({reason(error)}): it needs images, labels, split and class_names"
        ) from error
    for key, array in {"images": images, "labels": labels, "split": split, "class_names": names}.items():
        require(isinstance(array, np.ndarray), f"data.root: {key} in {path} is no array")
    require(
        labels.ndim == split.ndim == names.ndim == 1 and labels.dtype.kind in "iu",
        f"data.root: labels, split and class_names in {path} must be lists, labels of integers",
    )
    require(
        images.dtype == np.uint8 and images.ndim == 4 and images.shape[3] == 3 and 0 not in images.shape[1:],
        f"data.root: images in {path} are {images.dtype} {images.shape}, not uint8 (n, height, width, 3)",
    )
    require(
        len(images) == len(labels) == len(split)
        and int(labels.min(initial=0)) >= 0
        and int(labels.max(initial=0)) < len(names),
        f"data.root: images, labels, split and class_names in {path} do not belong together",
    )
    labels = labels.astype(np.int64)  # torch knows no other order of bytes
    train, test = ((images[split == part], labels[split == part]) for part in (0, 1))
    require(len(train[0]) > 0 and len(test[0]) > 0, f"data.root: {path} needs rows with split 0 (train) and 1 (test)")
    return [str(name) for name in names], train, test


def _require_room(path: Path) -> None:
    """A zip file of kilobytes may come to terabytes; what its directory says is the most that will be read."""
    try:
        with ZipFile(path) as file:
            size = sum(entry.file_size for entry in file.infolist())
    except (BadZipFile, ValueError, OSError):  # told by who reads it
        return
    free = available_bytes()
    text = f"data.root: {path} comes to {size / 1e9:.1f} GB, of {free / 1e9:.1f} GB that this machine has free"
    require(size < free, f"{text}: use a folder of images")


def _channels_first(images: ndarray, labels: Any) -> tuple[Tensor, Tensor]:
    import torch

    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(labels).long()
