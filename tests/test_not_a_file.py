"""Pipes, devices, folders and files without an end in the place of a file: every reader refuses them by name."""

import os
from pathlib import Path

import pytest
from PIL import Image

from trainer.checkpoint.manifest import CorruptCheckpointError, read_manifest
from trainer.commands.flags import load_yaml_file
from trainer.data import ImageFolder
from trainer.data.tables import open_class_folders, open_table
from trainer.errors import RecipeError
from trainer.models.hub import from_hub
from trainer.system.files import open_regular, open_writable
from trainer.weights.files import read_weights


def endless(path):
    path.touch()
    os.truncate(path, 1 << 40)  # a sparse file


HUGE = "larger than the limit of"
KINDS = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": Path.mkdir,
    HUGE: endless,
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


def manifest(path):
    read_manifest(path.parent)


def images(path):
    for folder in ("train/cat", "train/ship", "test/cat", "test/ship"):
        (path.parents[2] / folder).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path.parents[2] / folder / "0.png")
    ImageFolder(str(path.parents[2]), cache_dir=str(path.parents[2] / "cache")).prepare()


def texts(path):
    open_class_folders(path.parents[2], "train", [("pos", 1)], path.parents[2] / "cache")


def weights(path):
    from_hub("weights", str(path.parent), lambda: pytest.fail("opened"))


STREAMS = ("a named pipe", "a device")
FILES = (*STREAMS, "a directory")
LINKS = ("a named pipe", "a directory", "a link to nowhere", "a link to itself")
READERS = [
    ("file", open_regular, OSError, "it is KIND, not a regular file", FILES),
    ("file", lambda path: open_writable(path, os.O_RDWR | os.O_CREAT), OSError, "named pipe", STREAMS[:1]),
    ("manifest.json", manifest, CorruptCheckpointError, "cannot be read: it is KIND", (*FILES, HUGE)),
    ("settings.yaml", load_yaml_file, RecipeError, "cannot be read: it is KIND", (*STREAMS, HUGE)),
    ("train/cat/endless.png", images, RecipeError, "1 of 5 images cannot be read: .*it is KIND", STREAMS),
    ("train/pos/a.txt", texts, RecipeError, r"cannot be read \(it is KIND", STREAMS),
    ("table.csv", lambda path: open_table(path, path.parent / "cache"), RecipeError, "", STREAMS),
    ("model.safetensors", weights, RecipeError, "cannot be read: it is KIND", STREAMS),
    ("w.pt", read_weights, RecipeError, "does not exist", LINKS),
]
"""A file, what reads it, the error and its words, and what there is in its place."""


@pytest.mark.parametrize(
    ("kind", "file", "read", "error", "said"),
    [(kind, file, read, error, said) for file, read, error, said, kinds in READERS for kind in kinds],
)
def test_it_is_refused_at_once(kind, file, read, error, said, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    KINDS[kind](path)
    with pytest.raises(error, match=said.replace("KIND", kind) or None) as caught:
        read(path)
    assert path.name in str(caught.value)
