"""CPU time that a loader spends on an image, at 224 × 224: ours, and PIL, torchvision's transforms and torch's collate.

Both draw the same augmentation of the same images and must hand out the same bits. Images are those of CIFAR-10 in
memory (``--root`` is its .npz) and, as files, crops of the two photographs that scikit-learn has, 500 × 375 pixels.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: CPU time would count threads that wait for each other

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sklearn
import torch
from common import Record, table
from PIL import Image
from torch.utils.data import default_collate
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from trainer.data import CIFAR10, ImageFolder
from trainer.data.images import IMAGENET_MEAN_STD
from trainer.data.loader import Loader, preserve_rng_state, seed_everything
from trainer.values import Request

SIZE, SAMPLES, AUGMENTS, KINDS = 224, 96, ("none", "flip", "crop_flip"), ("arrays", "JPEGs")


def photographs(folder: Path) -> str:
    """A folder of 48 JPEGs in two classes."""
    chance = random.Random(0)
    for name in ("china", "flower"):
        (folder / "train" / name).mkdir(parents=True)
        whole = Image.open(Path(sklearn.__file__).parent / "datasets" / "images" / f"{name}.jpg")
        for number in range(24):
            x, y = chance.randrange(whole.width - 500), chance.randrange(whole.height - 375)
            whole.crop((x, y, x + 500, y + 375)).save(folder / "train" / name / f"{number}.jpg", quality=90)
    return str(folder)


def usual(split: Any, augment: str) -> Callable[[Request], Any]:
    """One sample after the other, as in torchvision's examples, and as this project did."""
    flip, crop = v2.RandomHorizontalFlip(), v2.RandomCrop(SIZE, padding=SIZE // 8, padding_mode="reflect")
    drawn = {"none": [], "flip": [flip], "crop_flip": [crop, flip]}[augment]
    scaled = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(*IMAGENET_MEAN_STD)]
    transform = v2.Compose([v2.Resize(SIZE, antialias=True), v2.CenterCrop(SIZE), *drawn, *scaled])

    def sample(index: int) -> dict[str, Any]:
        if split.samples is not None:
            path, label = split.samples[index]
            with Image.open(path) as image:
                return {"pixel_values": transform(F.pil_to_tensor(image.convert("RGB"))), "labels": label}
        return {"pixel_values": transform(split.images[index]), "labels": int(split.labels[index])}

    def load(request: Request) -> Any:
        samples = []
        with preserve_rng_state():
            for index, seed in zip(request.indices, request.seeds or (), strict=True):
                seed_everything(seed)
                samples.append(sample(index))
        return default_collate(samples)

    return load


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="data/cifar10.npz", help="CIFAR-10, as data.root of the dataset")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batch", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record, rows, found = Record("images", vars(arguments)), [], {}
    with tempfile.TemporaryDirectory() as folder:
        files = photographs(Path(folder))
        for kind in KINDS:
            for augment in AUGMENTS:
                settings: dict[str, Any] = {"image_size": SIZE, "augment": augment, "val_fraction": 0.25}
                data: Any = CIFAR10(arguments.root, download=False, **settings)
                data = data if kind == "arrays" else ImageFolder(files, cache_dir=folder, **settings)
                data.prepare()
                ours, chance, size = Loader(data.train, data.collate), random.Random(0), arguments.micro_batch
                indices = [chance.randrange(len(data.train)) for _ in range(SAMPLES)]
                pieces = [indices[at : at + size] for at in range(0, SAMPLES, size)]
                requests = [Request(piece, [chance.randrange(2**40) for _ in piece]) for piece in pieces]
                ways = {"usual": usual(data.train, augment), "ours": lambda one, ours=ours: next(iter(ours([one])))}
                times: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(arguments.rounds + 1):
                    batches = {}
                    for name, load in ways.items():
                        began = time.process_time()
                        batches[name] = [load(request) for request in requests]
                        if number:
                            times[name].append(1e3 * (time.process_time() - began) / SAMPLES)
                    for theirs, own in zip(*batches.values(), strict=True):
                        assert all(torch.equal(theirs[key], own[key]) for key in theirs)
                medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
                found[f"{kind}, {augment}"] = {"median_ms": medians, "rounds_ms": times}
                ratio = statistics.median(a / b for a, b in zip(times["usual"], times["ours"], strict=True))
                rows.append((kind, augment, *(f"{ms:.2f}" for ms in medians.values()), f"{ratio:.2f}"))
                record.write(complete=len(found) == len(KINDS) * len(AUGMENTS), cases=found)
    print(table(("images", "augment", "usual, ms a sample", "ours", "times as fast"), rows))


if __name__ == "__main__":
    main()
