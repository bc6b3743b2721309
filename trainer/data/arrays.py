"""Image samples as tensors: in-memory arrays, files on disk, and the transforms of both."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from trainer.data.cache import content_of
from trainer.data.common import reason
from trainer.data.fingerprint import Content
from trainer.errors import RecipeError
from trainer.system.files import open_regular, read_regular

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
"""What is read, whatever a file's name says. PIL knows others that start programs: Ghostscript reads EPS."""


MOST_BYTES = 2**29
"""Of an image file."""

MOST_PIXELS, MOST_SIDE, MOST_RATIO = 89_000_000, 65_535, 200
"""Of an image, known from its header. PIL takes 30 bytes for each row, and resizing gives the shorter side
``image_size`` pixels, and the longer side as many times more as it is longer."""


class Pixels:
    """Turn raw images into a model's input.

    Resizes the shorter side to ``image_size`` (bilinear, antialiased), cuts the centre square, draws the augmentation,
    scales to [0, 1] and normalises. Grey stays one channel, unless it is normalised like three.

    Args:
        image_size: height and width of the result, in pixels.
        mean, std: one value a channel of the raw image (or one for all), of pixels in [0, 1].
        augment: none, flip or crop_flip.
    """

    def __init__(self, image_size: int, mean: Sequence[float], std: Sequence[float], augment: str = "none") -> None:
        self.size = [image_size, image_size]
        self.mean, self.std = list(mean), list(std)
        self.augment = _augmentation(augment, image_size)
        self.settings = (self.size, self.mean, self.std, augment)

    def __call__(self, images: Tensor) -> Tensor:
        """``(..., 1 or 3, H, W)`` uint8 to ``(..., channels, image_size, image_size)`` float32."""
        if list(images.shape[-2:]) != self.size:
            images = F.resize(images, self.size[:1], interpolation=v2.InterpolationMode.BILINEAR, antialias=True)
            images = F.center_crop(images, self.size)
        if self.augment is not None:
            images = self.augment(images)
        images = F.to_dtype(images, torch.float32, scale=True)
        if len(self.mean) == 3 and images.shape[-3] == 1:
            images = images.expand(*images.shape[:-3], 3, *images.shape[-2:])
        return F.normalize(images, self.mean, self.std)


def _augmentation(name: str, image_size: int) -> v2.Transform | None:
    if name == "none":
        return None
    flip = v2.RandomHorizontalFlip()
    if name == "flip":
        return flip
    crop = v2.RandomCrop(image_size, padding=max(1, image_size // 8), padding_mode="reflect")
    return v2.Compose([crop, flip])


class ImageArrays:
    """Images held in memory as uint8 and converted when they are read.

    Args:
        images: uint8, shape ``(n, 1 or 3, H, W)``.
        labels: int64, shape ``(n,)``.
        pixels: the transform.
        source: what the images are, for messages.
        rows: the position of each image in ``source``.
    """

    def __init__(self, images: Tensor, labels: Tensor, pixels: Pixels, source: str, rows: Sequence[int]) -> None:
        whole = len(rows) == len(images)
        self.images, self.labels = (images, labels) if whole else (images[rows], labels[rows])
        self.pixels, self.source, self.rows = pixels, source, rows

    @property
    def augmented(self) -> bool:
        return self.pixels.augment is not None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels(self.images[index]), "labels": int(self.labels[index])}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A whole batch at once; augmented images are drawn one by one, for a batch would share its draws."""
        if self.augmented:
            return default_collate([self[i] for i in indices])
        chosen = torch.as_tensor(indices)
        return {"pixel_values": self.pixels(self.images[chosen]), "labels": self.labels[chosen]}

    def describe(self, index: int) -> str:
        return f"{self.source} image {self.rows[index]} (the first is image 0)"

    def fingerprint(self) -> str:
        """Of every pixel and label, in order, and of the transform."""
        return Content("images", self.images, self.labels, self.pixels.settings).hexdigest()


class ImageFiles:
    """Images read from files whenever they are asked for.

    Args:
        samples: ``(path, class)`` pairs.
        pixels: the transform, of three channels.
        checked: what :func:`check_images` said of every path, and perhaps others.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], pixels: Pixels, checked: Mapping[str, CheckedFile]) -> None:
        self.samples, self.pixels = samples, pixels
        self.digests = [checked[path].digest for path, _ in samples]
        self.broken = {path: fault for path, _ in samples if (fault := checked[path].fault)}

    @property
    def augmented(self) -> bool:
        return self.pixels.augment is not None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.samples[index]
        if path in self.broken:  # a decoder may make something of it all the same
            raise RecipeError(f"{path} cannot be read as an image ({self.broken[path]}): replace or remove it")
        return {"pixel_values": self.pixels(read_image(path, "RGB")), "labels": label}

    def describe(self, index: int) -> str:
        return self.samples[index][0]

    def fingerprint(self) -> str:
        """Of every byte of every file as it was checked, and its label, in order, and of the transform."""
        labels = [label for _, label in self.samples]
        return Content("files", b"".join(self.digests), np.asarray(labels), self.pixels.settings).hexdigest()


def read_image(path: str, mode: str) -> Tensor:
    """Decode a file to uint8 ``(channels, H, W)``; ``mode`` is PIL's, ``L`` or ``RGB``.

    Raises:
        RecipeError: naming the file when it is missing, broken or no image.
    """
    try:
        with open_regular(path, MOST_BYTES) as file, Image.open(file, formats=FORMATS) as image:
            _refuse_bomb(image)
            return F.pil_to_tensor(image.convert(mode))
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error... for broken files
        raise RecipeError(f"{path} cannot be read as an image ({reason(error)}): replace or remove it") from error


def _refuse_bomb(image: Image.Image) -> None:
    """Before anything is decoded: a few bytes can stand for gigabytes.

    Raises:
        ValueError: saying how large it is, and what is allowed.
    """
    width, height = image.size
    short, long = sorted(image.size)
    if width * height > MOST_PIXELS or long > MOST_SIDE or long > MOST_RATIO * max(1, short):
        raise ValueError(
            f"it has {width:,} x {height:,} pixels; at most {MOST_PIXELS:,} are read, {MOST_SIDE:,} on a side, and "
            f"{MOST_RATIO} times as many on one side as on the other: make it smaller"
        )


class CheckedFile(NamedTuple):
    """A file that was read to its end.

    Args:
        digest: sha256 of its content; empty for one that cannot be read at all.
        fault: what is wrong with it as an image, if anything.
    """

    digest: bytes
    fault: str | None


def check_images(paths: Sequence[str], most_bad: int, cache: Path) -> dict[str, CheckedFile]:
    """Read every file to its end, hash it, and check its structure, decoding as little as the format allows.

    Sound files are remembered in ``cache`` while their paths, sizes and times of change stay: one rank of a machine
    reads them, once.

    Raises:
        RecipeError: naming the broken files when they are more than ``most_bad``.
    """

    def in_threads(check: Callable[[Path], str], files: Sequence[Path]) -> Iterator[str]:
        with ThreadPoolExecutor(8) as pool:  # reading waits for the disk, or the network
            found = pool.map(check, files)
            yield from tqdm(found, total=len(files), desc="checking images", unit="image", disable=None, leave=False)

    answers = content_of(
        cache, [Path(path) for path in paths], _answer, "images", over=in_threads, worth_keeping=_sound
    )
    checked = {path: _checked(answer) for path, answer in zip(paths, answers, strict=True)}
    faults = [f"{path} ({found.fault})" for path, found in checked.items() if found.fault]
    if len(faults) > most_bad:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        allowed = f" (data.max_bad_samples={most_bad})" if most_bad else ""
        raise RecipeError(
            f"{len(faults)} of {len(paths)} images cannot be read{allowed}: {shown}. Replace or remove them"
        )
    return checked


def _answer(path: Path) -> str:
    found = _check(path)
    return json.dumps([found.digest.hex(), found.fault])


def _checked(answer: str) -> CheckedFile:
    digest, fault = json.loads(answer)
    return CheckedFile(bytes.fromhex(digest), fault)


def _sound(answers: Sequence[str]) -> bool:
    """A fault may be one of the disk, or the network, and gone the next time."""
    return all(_checked(answer).fault is None for answer in answers)


def _check(path: Path) -> CheckedFile:
    digest = b""
    try:
        content = read_regular(path, MOST_BYTES)
        digest = hashlib.sha256(content).digest()
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            _refuse_bomb(image)
            if image.format == "JPEG":  # verify() looks at nothing of it; at an eighth of its size, decoding is cheap
                image.draft("RGB", (1, 1))
                image.load()
            else:
                image.verify()
    except UnidentifiedImageError:  # its message has the address of the buffer
        return CheckedFile(digest, "UnidentifiedImageError: no known image format")
    except Exception as error:  # as in read_image
        return CheckedFile(digest, reason(error))
    return CheckedFile(digest, None)
