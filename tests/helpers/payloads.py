"""Files that execute code when loaded carelessly: the code makes a folder, so its absence shows that none ran."""

import hashlib
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.manifest import MANIFEST, Manifest


class Trap:
    """Unpickling this makes the folder ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def at(file: str, write: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    """A function that writes ``file`` of a folder."""

    def make(folder: Path, marker: Path) -> None:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write(folder / file, marker)

    return make


def content(value: bytes | str) -> Callable[[Path, Path], object]:
    """A function that writes ``value`` to a path."""
    return lambda path, marker: path.write_bytes(value.encode() if isinstance(value, str) else value)


def pickled(path: Path, marker: Path) -> None:
    """Write a pickle."""
    path.write_bytes(pickle.dumps(Trap(marker)))


def python(path: Path, marker: Path) -> None:
    """Write a module of Python."""
    path.write_text(code(marker))


def code(marker: Path) -> str:
    """Python that makes ``marker`` when it is imported, and defines what a configuration may ask for."""
    return f"import os\nos.mkdir({str(marker)!r})\nclass Evil:\n    pass\n"


def _opcodes(marker: Path) -> bytes:
    """A pickle written by hand, of the oldest protocol."""
    return b"cos\nmkdir\n(S" + repr(str(marker)).encode() + b"\ntR."


def _zip_of(path: Path, content: bytes) -> None:
    """Write a file in the format of torch.save, with ``content`` as its pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")


PICKLES: dict[str, Callable[[Path, Path], object]] = {
    "zip.pth": lambda path, marker: torch.save({"a": torch.zeros(2), "b": Trap(marker)}, path),
    "legacy.pt": lambda path, marker: torch.save(Trap(marker), path, _use_new_zipfile_serialization=False),
    "nested.pt": lambda path, marker: torch.save({"state_dict": [{"a": Trap(marker)}]}, path),
    "plain.pt": lambda path, marker: path.write_bytes(pickle.dumps({"a": Trap(marker)}, protocol=2)),
    "protocol5.pth": lambda path, marker: path.write_bytes(pickle.dumps(Trap(marker), protocol=5)),
    "opcodes.bin": lambda path, marker: path.write_bytes(_opcodes(marker)),
    "handmade.pt": lambda path, marker: _zip_of(path, _opcodes(marker)),
}
"""Weights: what ``torch.load`` without ``weights_only`` would execute."""


def _safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any ``header``; ``length`` is the length that it states for the header."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _tensors(size: int, **tensors: tuple[int, int, list[int]]) -> bytes:
    named = tensors.items()
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [a, b]} for name, (a, b, shape) in named}
    return _safetensors(json.dumps(header).encode(), b"\0" * size)


LYING: dict[str, bytes] = {
    "huge header": _safetensors(b"{}", length=2**62),
    "longer header": _safetensors(b"{}", length=100),
    "overlapping": _tensors(12, a=(0, 8, [2]), b=(4, 12, [2])),
    "beyond the end": _tensors(8, a=(0, 4096, [1024])),
    "wrong shape": _tensors(8, a=(0, 8, [2**40, 2**40])),
    "deep": _safetensors(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "no JSON": _safetensors(b"cos\nmkdir\n"),
    "a pickle": pickle.dumps({"a": 1}),
    "empty": b"",
}
"""Damaged or forged safetensors files."""


def yaml_tags(marker: Path) -> dict[str, str]:
    """YAML that constructs objects, or more of them than it has letters; as the value of ``seed``."""
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12))
    return {
        "apply": f"seed: !!python/object/apply:os.mkdir ['{marker}']",
        "new": f"seed: !!python/object/new:os.mkdir ['{marker}']",
        "apply with state": f"seed: !!python/object/apply:os.mkdir\n  args: ['{marker}']",
        "name": "seed: !!python/name:os.mkdir",
        "module": "seed: !!python/module:antigravity",
        "object": "seed: !!python/object:subprocess.Popen {}",
        "key": f"? !!python/object/apply:os.mkdir ['{marker}']\n: 1",
        "merge": f"<<: !!python/object/apply:os.mkdir ['{marker}']",
        "aliases": f"l0: &l0 [1]\n{levels}\nseed: *l11",
        "alias of itself": "seed: &a [*a]",
        "deep": "seed: " + "[" * 1_200 + "]" * 1_200,
        "list as key": "? [seed]\n: 1",
        "no integer": "seed: !!int x",
        "no date": "seed: 2024-99-99",
        "control": "seed: \x01",
    }


def write_npz(path: Path, **arrays: Any) -> None:
    """A CIFAR-10 file of four images, with ``arrays`` in the place of its own."""
    own = {"images": np.zeros((4, 32, 32, 3), np.uint8), "labels": np.array([0, 1, 0, 1])}
    own |= {"split": np.array([0, 0, 1, 1]), "class_names": np.array(["a", "b"])}
    np.savez(path, **{**own, **arrays})


def object_array(marker: Path) -> np.ndarray:
    """One that NumPy writes as a pickle."""
    array = np.empty(4, dtype=object)
    array[0] = Trap(marker)
    return array


def tar_with_links(path: Path, outside: Path) -> None:
    """Members that would be written ``outside`` the folder that they are unpacked to."""
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside.parent)
        tar.addfile(link)
        for name in (f"../../{outside.name}", str(outside), f"link/{outside.name}"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"bad"))


def zip_with_dots(path: Path, outside: Path) -> None:
    """The same as a zip archive."""
    with zipfile.ZipFile(path, "w") as file:
        for name in (f"../../{outside.name}", str(outside), "train.csv"):
            file.writestr(name, "text,label\ngood,0\n")


def edit_json(path: Path, **changes: Any) -> None:
    """Set entries of a JSON file."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def set_entry(path: Path, way: Sequence[Any], value: Any) -> None:
    """Put ``value`` in the place of another in a JSON file; ``way`` leads to it."""
    content = inner = json.loads(path.read_text())
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = value
    path.write_text(json.dumps(content))


def fit_manifest(checkpoint: Path, file: str) -> None:
    """Make the manifest fit a changed file: hashes find accidents, not intentions."""
    written = (checkpoint / file).read_bytes()
    stated = json.loads((checkpoint / MANIFEST).read_text())
    stated["files"][file] = {"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()}
    del stated["digest"]
    (checkpoint / MANIFEST).write_text(Manifest(**stated).to_json())


DEEP_JSON = '{"a":' * 100_000 + "1" + "}" * 100_000

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) print showpage\n%%EOF\n"

CHECKPOINT_STATES: list[tuple[str, Any]] = [
    *(("counters", [1]), ("counters.step", "1"), ("counters.step", 7), ("counters.epoch", None)),
    *(("skipped_steps", 1.5), ("scheduler.steps", "1"), ("scheduler.rates", 0.1), ("scheduler.rates", ["x"])),
    *(("scheduler.rates", []), ("overlapped", "no"), ("halvings", 10**12), ("quarantine", [])),
    *(("quarantine.samples", [{"position": "x"}]), ("stopwatch.seconds", None), ("stopwatch", {})),
]
"""Entries of a checkpoint's state.json, and values that no run writes."""
