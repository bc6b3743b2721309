"""Image samples as tensors: in-memory arrays, files on disk, and the transforms of both."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from trainer.contract import DrawnSamples
from trainer.data.base import explain_faults, root_cause
from trainer.data.cache import inspect_cached
from trainer.data.fingerprint import ContentHasher
from trainer.errors import RecipeError, require
from trainer.system.files import open_regular, read_regular

if TYPE_CHECKING:
    from trainer.data.images import Augmentation

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")  # PIL's others may start programs, such as Ghostscript
MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGE_SIDE, MAX_ASPECT_RATIO = 2**29, 89_000_000, 65_535, 200
"""Limits of an image file and of the image in its header. PIL needs 30 bytes per row, and resizing the shorter side to
``image_size`` scales the longer side with it."""
POLICIES = {"randaugment": v2.RandAugment, "autoaugment": v2.AutoAugment, "trivialaugment": v2.TrivialAugmentWide}


class ImageTransform:
    """The transform from raw images to a model's input, with the random ``changes`` of training images.

    Resizes the shorter side to ``image_size`` pixels (bilinear, antialiased), crops the centre square, applies the
    augmentation, scales to [0, 1] and normalises by ``mean`` and ``std``, per channel of the raw image or one for all.
    """

    def __init__(self, image_size: int, mean: Sequence[float], std: Sequence[float], changes: Augmentation) -> None:
        self.size, self.border = [image_size, image_size], max(1, image_size // 8)
        augment, mirror, transform = changes.augment, changes.mirror, changes.transform
        crop, jitter, erasing = changes.random_resized_crop, changes.color_jitter, changes.erasing
        self.augment, self.mirror, self.transform = augment, mirror, transform
        more: dict[str, Any] = {"mirror": not mirror, "crop": crop, "jitter": jitter, "erasing": erasing}
        more |= {"transform": transform and _name_of(transform)}
        more = {name: value for name, value in more.items() if value}
        self.settings = (self.size, list(mean), list(std), augment, *([more] if more else []))
        self.augmented = augment != "none" or bool(more.keys() - {"mirror"})
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (mean, std))
        self.crop = None if crop is None else v2.RandomResizedCrop(self.size, (crop, 1.0), antialias=True)
        self.changes: list[Callable[[Tensor], Tensor]] = []
        if augment in POLICIES:
            self.changes += [*([v2.RandomHorizontalFlip()] if mirror else []), POLICIES[augment]()]
        elif augment != "none":
            self.changes.append(self._crop_and_flip)
        if jitter:
            self.changes.append(v2.ColorJitter(jitter, jitter, jitter))
        if erasing:
            self.changes.append(v2.RandomErasing(erasing, value=255 * sum(mean) / len(mean)))

    def __call__(self, images: Tensor) -> Tensor:
        """Transform ``(..., 1 or 3, H, W)`` uint8 to ``(..., channels, image_size, image_size)`` float32."""
        return self.normalize(self.augment_bytes(images))

    def augment_bytes(self, images: Tensor) -> Tensor:
        """Resize, crop and augment bytes to ``(..., 1 or 3, image_size, image_size)``, with one draw for all."""
        if self.transform is not None:
            images = _transformed(self.transform, images)
        if self.crop is not None:
            images = self.crop(images)
        elif list(images.shape[-2:]) != self.size:
            images = F.resize(images, self.size[:1], interpolation=v2.InterpolationMode.BILINEAR, antialias=True)
            images = F.center_crop(images, self.size)
        for change in self.changes:
            images = change(images)
        return images

    def _crop_and_flip(self, images: Tensor) -> Tensor:
        """Apply v2.RandomCrop with a reflected border and v2.RandomHorizontalFlip, same draws, by faster indexing."""
        if self.augment == "flip":
            return images.flip(-1) if torch.rand(1) < 0.5 else images
        places, last = np.arange(self.size[0]), self.size[0] - 1
        shifts = [int(torch.randint(0, 2 * self.border + 1, (1,))) - self.border for _ in range(2)]
        rows, columns = (last - abs(last - abs(places + shift)) for shift in shifts)
        columns = columns[::-1] if self.mirror and torch.rand(1) < 0.5 else columns
        return torch.from_numpy(images.numpy().take(rows, -2).take(columns, -1))

    def normalize(self, images: Tensor) -> Tensor:
        """Convert bytes to normalised float32. Whole micro-batches at once, in place, take a third of the time."""
        scaled = torch.empty(*images.shape[:-3], max(images.shape[-3], len(self.mean)), *self.size)
        return scaled.copy_(images).mul_(1 / 255).sub_(self.mean).div_(self.std)


def _transformed(transform: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    found = transform(image)
    is_image = isinstance(found, Tensor) and found.dtype == torch.uint8 and found.ndim == 3 and 0 not in found.shape
    if not is_image or len(found) != len(image):
        what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        cause = f"{_name_of(transform)} returned {what} for an image torch.uint8 {tuple(image.shape)}"
        raise RecipeError(f"data.transform: {cause}: return uint8 (channels, height, width), with its channels")
    return found


def _name_of(transform: Callable[..., Any]) -> str:
    """Return a name that is equal in every process: a function's name, or the repr of a module with its settings."""
    name = getattr(transform, "__qualname__", None) or type(transform).__qualname__
    return repr(transform) if isinstance(transform, torch.nn.Module) else name


class ImageSplit(DrawnSamples):
    """Base class of image splits, whose samples a loader may draw alone and scale all :meth:`together`.

    ``draw`` returns a sample's cropped and augmented bytes, ``(1 or 3, image_size, image_size)``, and its label.
    """

    def __init__(self, pixels: ImageTransform) -> None:
        self.pixels, self.augmented = pixels, pixels.augmented

    def together(self, drawn: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
        images, labels = zip(*drawn, strict=True)
        return {"pixel_values": self.pixels.normalize(torch.stack(images)), "labels": torch.tensor(labels)}

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.draw(index)
        return {"pixel_values": self.pixels.normalize(image), "labels": label}


class ImageArrays(ImageSplit):
    """The ``rows`` of ``images``, uint8 ``(n, 1 or 3, H, W)``, and ``labels``, int64 ``(n,)``; converted when read."""

    images: Tensor
    labels: Any

    def __init__(
        self, images: Tensor, labels: Tensor, source: str, rows: Sequence[int], pixels: ImageTransform
    ) -> None:
        self.images, self.labels = (images, labels) if len(rows) == len(images) else (images[rows], labels[rows])
        self.source, self.rows = source, rows
        super().__init__(pixels)

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, index: int) -> tuple[Tensor, int]:
        return self.pixels.augment_bytes(self.images[index]), int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return a whole batch. Augmented images are drawn one by one, because a batch would share its draws."""
        if self.augmented:
            return self.together([self.draw(i) for i in indices])
        chosen = torch.as_tensor(indices)
        return {"pixel_values": self.pixels(self.images[chosen]), "labels": self.labels[chosen]}

    def describe(self, index: int) -> str:
        return f"{self.source} image {self.rows[index]} (the first is image 0)"

    def fingerprint(self) -> str:
        return ContentHasher("images", self.images, self.labels, self.pixels.settings).hexdigest()


class CheckedFile(NamedTuple):
    digest: str  # sha256 of the file in hexadecimal; empty if it is unreadable
    fault: str | None  # the reason if it is not a valid image


class ImageFiles(ImageSplit):
    """Images as ``(path, class)``, read on access. ``checked`` comes from :func:`check_images`, for at least these."""

    samples: Sequence[tuple[str, int]]
    digests: list[bytes]

    def __init__(
        self, samples: Sequence[tuple[str, int]], pixels: ImageTransform, checked: Mapping[str, CheckedFile]
    ) -> None:
        super().__init__(pixels)
        self.samples, self.labels = samples, [label for _, label in samples]
        self.digests = [bytes.fromhex(checked[path].digest) for path, _ in samples]
        self.broken = {path: fault for path, _ in samples if (fault := checked[path].fault)}

    def __len__(self) -> int:
        return len(self.samples)

    def draw(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        if path in self.broken:  # a decoder may still return something
            raise RecipeError(f"{path} cannot be read as an image ({self.broken[path]}): replace or remove it")
        return self.pixels.augment_bytes(read_image(path, "RGB")), label

    def describe(self, index: int) -> str:
        return self.samples[index][0]

    def fingerprint(self) -> str:
        return ContentHasher("files", b"".join(self.digests), np.asarray(self.labels), self.pixels.settings).hexdigest()


def read_image(path: str, mode: str) -> Tensor:
    """Decode a file to uint8 ``(channels, H, W)``; ``mode`` is PIL's, ``L`` or ``RGB``."""
    with (
        explain_faults(f"{path} cannot be read as an image", "replace or remove it"),
        open_regular(path, MAX_IMAGE_BYTES) as file,
        Image.open(file, formats=FORMATS) as image,
    ):
        _reject_decompression_bomb(image)
        if image.format == "JPEG" and image.mode == mode == "RGB":  # PIL takes 1.5 times as long for the same bits
            file.seek(0)
            with suppress(RuntimeError):  # PIL may read it, or gives a better message
                return decode_jpeg(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8))
        return F.pil_to_tensor(image.convert(mode))


def _reject_decompression_bomb(image: Image.Image) -> None:
    """Reject an oversized image by its header, because a few bytes can expand to gigabytes."""
    width, height = image.size
    short, long = sorted(image.size)
    if width * height > MAX_IMAGE_PIXELS or long > MAX_IMAGE_SIDE or long > MAX_ASPECT_RATIO * max(1, short):
        limits = f"{MAX_IMAGE_PIXELS:,} in total, {MAX_IMAGE_SIDE:,} per side, and a ratio of {MAX_ASPECT_RATIO}"
        raise ValueError(f"it has {width:,} x {height:,} pixels; the max is {limits} of the sides: make it smaller")


def check_images(paths: Sequence[str], max_bad: int, cache: Path) -> dict[str, CheckedFile]:
    """Read and hash every file and check its structure with little decoding; reject more than ``max_bad`` bad files.
    ``cache`` remembers only valid files, because a bad one may be a fault of the network."""

    def look(files: Sequence[Path]) -> list[CheckedFile]:
        with ThreadPoolExecutor(8) as pool:  # reading is bound by the disk or the network
            found = pool.map(_check, files)
            return list(tqdm(found, total=len(files), desc="checking images", unit="image", disable=None, leave=False))

    def sound(answers: Sequence[CheckedFile]) -> bool:
        return all(fault is None for _, fault in answers)

    answers = inspect_cached(cache, list(map(Path, paths)), look, "image files", worth_keeping=sound)
    checked = {path: CheckedFile(*answer) for path, answer in zip(paths, answers, strict=True)}
    faults = [f"{path} ({found.fault})" for path, found in checked.items() if found.fault]
    shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
    allowed = f" (data.max_bad_samples={max_bad})" if max_bad else ""
    unreadable = f"{len(faults)} of {len(paths)} images cannot be read{allowed}: {shown}"
    require(len(faults) <= max_bad, f"{unreadable}. Replace or remove them")
    return checked


def _check(path: Path) -> CheckedFile:
    digest = ""
    try:
        content = read_regular(path, MAX_IMAGE_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _reject_decompression_bomb(image)
            if image.format == "JPEG":  # verify() checks nothing here; decoding at an eighth of the size is cheap
                image.draft("RGB", (1, 1))
                image.load()
            else:
                image.verify()
    except UnidentifiedImageError:  # its message contains the address of the buffer
        return CheckedFile(digest, "UnidentifiedImageError: no known image format")
    except Exception as error:  # as in read_image
        return CheckedFile(digest, root_cause(error))
    return CheckedFile(digest, None)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's digits, float64 ``(1797, 8, 8)`` from 0 to 16, and classes, without its slow import."""
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    path = Path(next(iter(folders or ["sklearn"]))) / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():  # another version of scikit-learn may store the file elsewhere
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target.astype(np.int64)
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
