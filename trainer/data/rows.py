"""Rows of text and label as they lie in files or on the hub, each of which can be named to a person."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pandas
from datasets.utils.extract import Extractor

from trainer.data.cache import checksum, content_of, hash_of
from trainer.data.common import reason
from trainer.errors import RecipeError, require

_BUILDERS = {".csv": "csv", ".parquet": "parquet", ".jsonl": "json"}
_COUNTING = {
    ".csv": (2, "the header is row 1, blank lines are not counted"),
    ".parquet": (1, "the first is row 1"),
    ".jsonl": (1, "the first is row 1, blank lines are not counted"),
}


@dataclass(frozen=True)
class Rows:
    """One split as it was found.

    Args:
        content: a hash of what is in it.
        read: puts the rows on disk, with a cache in the folder that it is given.
        source: the file or data set, for messages.
        first: number of the first row, as ``counting`` counts.
        counting: how rows are numbered, in words.
        files: the file of every row, where each has its own.
    """

    content: str
    read: Callable[[str], datasets.Dataset]
    source: str
    first: int = 0
    counting: str = ""
    files: Sequence[str] = ()

    def describe(self, index: int) -> str:
        if self.files:
            return self.files[index]
        return f"{self.source} row {index + self.first} ({self.counting})"


def check_columns(source: str, found: Sequence[str], **wanted: str) -> None:
    """Refuse a missing column: ``text_column="text"`` says which field asks for which."""
    for field, name in wanted.items():
        near = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
        require(
            name in found,
            f"data.{field}={name!r}: {source} has no such column; it has {', '.join(map(repr, found))}"
            + (f"; did you mean {near[0]!r}?" if near else ""),
        )


def is_missing(value: Any) -> bool:
    """Whether a cell holds nothing."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def find_file(path: Path, cache: Path) -> Rows:
    """The rows of a .csv, .parquet or .jsonl file.

    Raises:
        RecipeError: naming the file when it is missing or of another kind; when they are read, also when it is empty
            or malformed.
    """
    kind = path.suffix.lower()
    require(path.is_file(), f"there is no file {path}: check the path")
    require(kind in _BUILDERS, f"{path} is none of {', '.join(_BUILDERS)}: convert it to one of them")
    (content,) = content_of(cache, [path], partial(checksum, most_bytes=math.inf))
    return Rows(f"{kind} {content}", partial(_read_file, path, kind), str(path), *_COUNTING[kind])


def _read_file(path: Path, kind: str, cache_dir: str) -> datasets.Dataset:
    try:
        _refuse_archive(path)
        if kind == ".jsonl":
            _parse_lines(path)
        options = _csv_options(path) if kind == ".csv" else {}
        table = datasets.load_dataset(
            _BUILDERS[kind], data_files=str(path), split="train", cache_dir=cache_dir, **options
        )
    except Exception as error:  # each format's reader has its own exceptions
        raise RecipeError(f"{path} cannot be read as {kind[1:]} ({reason(error)}): mend the file") from error
    require(len(table) > 0, f"{path} has no rows")
    return table


def _refuse_archive(path: Path) -> None:
    """datasets would unpack one, whatever its name says."""
    if Extractor.infer_extractor_format(path) is not None:
        raise ValueError("it is compressed or an archive: unpack it first, where you can see what is in it")


def _parse_lines(path: Path) -> None:
    """Parse every line here first: one that is nested some thousand times would end the process within datasets."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} holds no JSON object")  # noqa: TRY004


def _csv_options(path: Path) -> dict[str, Any]:
    """Read every cell as it stands: no review that says "null" turns into a missing one, no label into 1.0."""
    columns = pandas.read_csv(path, nrows=0).columns
    features = datasets.Features({name: datasets.Value("string") for name in columns})
    return {"features": features, "keep_default_na": False}


def find_folders(root: Path, part: str, classes: Sequence[tuple[str, int]], cache: Path) -> Rows:
    """The rows ROOT/PART/NAME/*.txt, one text a file, for every ``(name, label)`` of ``classes``.

    Raises:
        RecipeError: for a missing folder or one without texts; when they are read, for a file that is not UTF-8.
    """
    files: list[tuple[str, int]] = []
    for name, label in classes:
        folder = root / part / name
        paths = sorted(folder.glob("*.txt"))
        require(len(paths) > 0, f"{folder} is missing or holds no .txt files")
        files += [(str(path), label) for path in paths]
    hashes = content_of(cache, [Path(path) for path, _ in files], partial(checksum, most_bytes=math.inf))
    content = hash_of(hashes, [label for _, label in files])
    return Rows(
        content, partial(_read_folders, root / part, files), str(root / part), files=[path for path, _ in files]
    )


def _read_folders(folder: Path, files: list[tuple[str, int]], cache_dir: str) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(_read_texts, gen_kwargs={"files": files}, cache_dir=cache_dir)
    except Exception as error:  # datasets wraps what the generator raises
        raise RecipeError(f"{folder} cannot be read: {reason(error)}") from error


def _read_texts(files: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    for path, label in files:
        yield {"text": _read_text(path), "label": label}


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except ValueError:
        raise RecipeError(f"{path} is not UTF-8 text: save it as UTF-8 or remove it") from None


def find_hub(name: str, cache_dir: str | None) -> dict[str, Rows]:
    """Load the train and test splits of a dataset from the Hugging Face hub, or from its cache.

    Raises:
        RecipeError: when it cannot be reached or has no such splits.
    """
    try:
        tables = datasets.load_dataset(name, split=["train", "test"], cache_dir=cache_dir)
    except Exception as error:  # connection, authentication, missing dataset, missing split: one list would not do
        raise RecipeError(
            f"data.root={name!r} is no folder here and could not be loaded from https://huggingface.co/datasets/{name} "
            f"({reason(error)}): check the name and the network, or set data.root to a folder with train.csv and "
            "test.csv, or to an unpacked aclImdb folder"
        ) from error
    parts = zip(("train", "test"), tables, strict=True)
    counting = "the first is row 0, as on the hub"
    # The fingerprint follows the revision on the hub.
    return {
        part: Rows(table._fingerprint, partial(_as_loaded, table), f"{name} {part}", 0, counting)
        for part, table in parts
    }


def _as_loaded(table: datasets.Dataset, cache_dir: str) -> datasets.Dataset:
    return table
