"""Folders of images, arrays of images, and the files of Fashion-MNIST."""

# fmt: off
# ruff: noqa: E501
from __future__ import annotations

import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from hostile_cases.case import (
    ANY,
    ESC,
    FIT,
    RAN,
    REFUSED,
    Case,
    done,
    own,
    picture,
    wrote,
)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _png(width: int, height: int, *extra: bytes, pixels: bytes = b"") -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + _chunk(b"IDAT", zlib.compress(pixels)) + _chunk(b"IEND", b"")


PICTURES: dict[str, tuple[Callable[[], bytes], str]] = {
    "0 bytes": (lambda: b"", REFUSED),
    "1 pixel": (lambda: picture(size=(1, 1)), RAN),
    "an animated GIF": (lambda: picture("GIF", mode="P", frames=True), RAN),
    "CMYK": (lambda: picture("JPEG", mode="CMYK"), RAN),
    "16 bits": (lambda: picture(mode="I;16"), RAN),
    "floats": (lambda: picture("TIFF", mode="F"), RAN),
    "a JPEG that is cut": (lambda: picture("JPEG", (64, 64))[:-300], REFUSED),
    "a PNG that is cut": (lambda: picture(size=(64, 64))[:-30], REFUSED),
    "a PNG of 60,000 x 60,000": (lambda: _png(60_000, 60_000), REFUSED),
    "a PNG without its pixels": (lambda: _png(8, 8), REFUSED),
    "a PNG with a text of 200 MB": (lambda: _png(8, 8, _chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 200_000_000)), pixels=b"\0" * 200), ANY),
    "a PNG with a profile of 100 MB": (lambda: _png(8, 8, _chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x" * 100_000_000)), pixels=b"\0" * 200), ANY),
    "a TIFF of a million pages": (lambda: b"II*\0\x08\0\0\0\0\0\x08\0\0\0", REFUSED),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", REFUSED),
}


def images() -> Iterable[Case]:
    """Folders of images, arrays of them and the files of Fashion-MNIST."""
    source = own("MLP(hidden=[4])", "ImageFolder('pics', image_size=8, cache_dir='cache')", "batch_size=4")

    def pics(make: Callable[[], Any]) -> list[str]:
        for part in ("train", "test"):
            for name in "ab":
                for number in range(2):
                    wrote(f"pics/{part}/{name}/{number}.png", picture(), [])
        make()
        return wrote("own.py", source, FIT)

    for given, (made, expect) in PICTURES.items():
        build = partial(pics, lambda made=made: wrote("pics/train/a/odd.png", made(), []))
        yield Case("images", given, build, expect, "odd.png" if expect == REFUSED else "")
    for given, action, expect in (
        ("a folder odd.png", lambda: os.mkdir("pics/train/a/odd.png"), ANY),
        ("a link to itself", lambda: os.symlink("odd.png", "pics/train/a/odd.png"), REFUSED),
        ("a link that leads nowhere", lambda: os.symlink("nowhere.png", "pics/train/a/odd.png"), REFUSED),
        ("a loop of folders", lambda: os.symlink("..", "pics/train/a/up"), ANY),
        ("a class of no images", lambda: os.mkdir("pics/train/c"), REFUSED),
        ("a class that is a file", lambda: wrote("pics/train/c", "x", []), ANY),
        ("a class with escapes", lambda: os.mkdir(f"pics/train/{ESC}"), REFUSED),
        (
            "two classes that look alike",
            lambda: [
                wrote(f"pics/{p}/{n}/0.png", picture(), []) for p in ("train", "test") for n in ("\xe9", "e\u0301")
            ],
            ANY,
        ),
        ("a name with a newline", lambda: wrote("pics/train/a/x\ntrainer: error: forged.png", b"", []), REFUSED),
        ("no train", lambda: shutil.rmtree("pics/train"), REFUSED),
        ("a test class of its own", lambda: wrote("pics/test/z/0.png", picture(), []), REFUSED),
    ):
        yield Case("images", given, partial(pics, action), expect)
    yield from _arrays()
    yield from _idx()


def _arrays() -> Iterable[Case]:
    import numpy as np

    source = own("MLP(hidden=[4])", "CIFAR10('x.npz')", "batch_size=4")
    pixels, labels = np.zeros((8, 32, 32, 3), np.uint8), np.array([0, 1] * 4)
    good: dict[str, Any] = {
        "images": pixels,
        "labels": labels,
        "split": np.array([0] * 4 + [1] * 4),
        "class_names": np.array(["a", "b"]),
    }

    def write(changed: Mapping[str, Any]) -> list[str]:
        np.savez("x.npz", **{key: value for key, value in (good | dict(changed)).items() if value is not None})
        return wrote("own.py", source, FIT)

    def bomb(name: str, head: bytes, count: int) -> list[str]:
        write({name: None})
        with zipfile.ZipFile("x.npz", "a", zipfile.ZIP_DEFLATED) as file, file.open(f"{name}.npy", "w", force_zip64=True) as member:
            member.write(head)
            for _ in range(count):
                member.write(b"\0" * 2**20)
        return FIT

    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (2000000, 32, 32, 3), }"
    large = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n"
    rows: list[tuple[str, Callable[[], list[str]], str]] = [
        ("floats", partial(write, {"images": pixels.astype("float32")}), REFUSED),
        ("labels of floats that are nan", partial(write, {"labels": np.full(8, np.nan)}), REFUSED),
        ("a label of -1", partial(write, {"labels": np.array([-1, 1] * 4)}), REFUSED),
        ("a label of 2^63", partial(write, {"labels": np.array([2**63, 1] * 4, np.uint64)}), REFUSED),
        ("too few labels", partial(write, {"labels": labels[:3]}), REFUSED),
        ("no labels", partial(write, {"labels": None}), REFUSED),
        ("a split of 7", partial(write, {"split": np.full(8, 7)}), REFUSED),
        ("a split of texts", partial(write, {"split": np.array(["0"] * 8)}), REFUSED),
        ("a split of booleans", partial(write, {"split": np.array([False, True] * 4)}), ANY),
        ("names of control characters", partial(write, {"class_names": np.array([ESC, "b"])}), RAN),
        ("names of bytes", partial(write, {"class_names": np.array([b"\xff", b"b"])}), ANY),
        ("one class", partial(write, {"class_names": np.array(["a"]), "labels": np.zeros(8, int)}), ANY),
        ("images of no height", partial(write, {"images": np.zeros((8, 0, 32, 3), np.uint8)}), REFUSED),
        ("big-endian labels", partial(write, {"labels": labels.astype(">i8")}), ANY),
        ("columns before rows", partial(write, {"images": np.asfortranarray(pixels)}), RAN),
        ("6 GB in a file of 6 MB", partial(bomb, "images", large, 5860), REFUSED),
        ("an array cut off", partial(bomb, "images", large, 1), REFUSED),
        ("no zip", lambda: wrote("x.npz", b"PK\x03\x04nonsense", wrote("own.py", source, FIT)), REFUSED),
        ("a folder x.npz", lambda: done(partial(os.mkdir, "x.npz"), wrote("own.py", source, FIT)), REFUSED),
    ]
    for given, build, expect in rows:
        yield Case("images", f"npz: {given}", build, expect, "x.npz" if expect == REFUSED else "")


def _idx() -> Iterable[Case]:
    source = own("MLP(hidden=[4])", "FashionMNIST('d', download=False)", "batch_size=4")

    def write(**changed: bytes) -> list[str]:
        for part in ("train", "t10k"):
            pixels = struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(4 * 784)
            labels = struct.pack(">II", 0x801, 4) + bytes([0, 1, 2, 3])
            for kind, content in (("images-idx3", pixels), ("labels-idx1", labels)):
                new = changed.get(kind[:6], content) if part == "train" else content
                wrote(f"d/FashionMNIST/raw/{part}-{kind}-ubyte", new, [])
        return wrote("own.py", source, FIT)

    for given, changed, expect in (
        ("as it should be", {}, RAN),
        ("another magic number", {"images": struct.pack(">IIII", 0x12345678, 4, 28, 28)}, REFUSED),
        ("images cut off", {"images": struct.pack(">IIII", 0x803, 4, 28, 28) + bytes(99)}, REFUSED),
        ("2^32 images", {"images": struct.pack(">IIII", 0x803, 2**32 - 1, 28, 28) + bytes(99)}, REFUSED),
        ("images of floats", {"images": struct.pack(">IIII", 0xD03, 4, 28, 28) + bytes(4 * 784 * 4)}, REFUSED),
        (
            "no images",
            {"images": struct.pack(">IIII", 0x803, 0, 28, 28), "labels": struct.pack(">II", 0x801, 0)},
            REFUSED,
        ),
        ("too few labels", {"labels": struct.pack(">II", 0x801, 2) + bytes(2)}, REFUSED),
        ("labels of 200", {"labels": struct.pack(">II", 0x801, 4) + bytes([200] * 4)}, REFUSED),
        ("empty", {"images": b""}, REFUSED),
    ):
        yield Case("images", f"idx: {given}", partial(write, **changed), expect)
