"""Image samples as tensors: in-memory arrays, files on disk, and the transforms of both."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from tqdm import tqdm

from trainer.data.common import reason
from trainer.errors import RecipeError

FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
"""What is read, whatever a file's name says. PIL knows others that start programs: Ghostscript reads EPS."""


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


class ImageFiles:
    """Images read from files whenever they are asked for.

    Args:
        samples: ``(path, class)`` pairs.
        pixels: the transform, of three channels.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], pixels: Pixels) -> None:
        self.samples, self.pixels = samples, pixels

    @property
    def augmented(self) -> bool:
        return self.pixels.augment is not None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, label = self.samples[index]
        return {"pixel_values": self.pixels(read_image(path, "RGB")), "labels": label}

    def describe(self, index: int) -> str:
        return self.samples[index][0]


def read_image(path: str, mode: str) -> Tensor:
    """Decode a file to uint8 ``(channels, H, W)``; ``mode`` is PIL's, ``L`` or ``RGB``.

    Raises:
        RecipeError: naming the file when it is missing, broken or no image.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            return F.pil_to_tensor(image.convert(mode))
    except Exception as error:  # PIL raises OSError, SyntaxError, ValueError, struct.error... for broken files
        raise RecipeError(f"{path} cannot be read as an image ({reason(error)}): replace or remove it") from error


def verify_images(paths: Sequence[str]) -> None:
    """Read every file to its end and check its structure, decoding as little as the format allows.

    Raises:
        RecipeError: naming the broken files.
    """
    with ThreadPoolExecutor(8) as pool:  # reading waits for the disk, or the network
        checks = tqdm(
            pool.map(_fault, paths), total=len(paths), desc="checking images", unit="image", disable=None, leave=False
        )
        faults = [fault for fault in checks if fault]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise RecipeError(f"{len(faults)} of {len(paths)} images cannot be read: {shown}. Replace or remove them")


def _fault(path: str) -> str | None:
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.format == "JPEG":  # verify() looks at nothing of it; at an eighth of its size, decoding is cheap
                image.draft("RGB", (1, 1))
                image.load()
            else:
                image.verify()
    except Exception as error:  # as in read_image
        return f"{path} ({reason(error)})"
    return None
