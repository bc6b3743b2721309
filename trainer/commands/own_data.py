"""``trainer fit my.csv``, ``photos/`` or ``chats.jsonl``: infer the recipe and its flags from the start of the data.

Nothing here imports torch, pandas or datasets. The full reader of the dataset still checks every row."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from trainer.data.base import IMAGES, format_counts
from trainer.data.rows import MAX_ROWS, first_rows
from trainer.data.text import csv_format, is_continuous
from trainer.errors import RecipeError, format_list, require

MAX_CLASSES = 50  # distinct values of a column that can be the label without being called so
MIN_ROWS_TO_SPLIT = 20
HELD_OUT = "0.1"  # share of the rows for validation if there is no file for it
TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
DOCUMENTS = (".txt", ".md", ".rst", ".py")
PARTS = {"val": ("val", "valid", "validation", "dev"), "test": ("test", "eval")}  # names of files next to train
TEXT_NAMES = ("text", "review", "sentence", "content", "comment", "message", "body", "document", "tweet", "utterance")
LABEL_NAMES = ("label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "stars", "rating")
PAIRS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("text1", "text2"))
CHATS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})
NAMED = {("chosen", "rejected"): "lm_dpo --data.val_files null --data.train_files"}  # columns that decide the recipe
NAMED |= {("anchor", "positive"): "sentence_pairs --data.train_file"}
Rows = Sequence[Mapping[str, Any]]


class Inferred(NamedTuple):
    """A packaged recipe and its flags for a file or folder, and a line about the data."""

    recipe: str
    flags: dict[str, str]
    data: str

    def command(self, command: str) -> str:
        """Return the equivalent command line."""
        words = [f"--{name} {shlex.quote(text)}" for name, text in self.flags.items()]
        return " ".join([f"trainer {command}", self.recipe, *words])


def is_own_data(reference: str) -> bool:
    """Return whether ``reference`` is a file or folder with data, rather than a recipe or a run directory."""
    path = Path(reference)
    if os.path.isdir(reference):
        return not any(os.path.isfile(path / name) for name in ("recipe.yaml", "config.json"))
    return path.suffix.lower() in {*TABLES, *DOCUMENTS} - {".py"} and os.path.isfile(reference)  # .py is a recipe


def infer(reference: str, given: Mapping[str, str], command: str = "fit") -> Inferred:
    """Infer recipe and flags for ``reference``: a table, a text, or a folder of images, texts or tables.

    The flags ``given`` by the user are not inferred, and decide between several columns. Raises ``RecipeError`` if the
    data have no reading, or more than one; it names the flags that decide.
    """
    path = Path(reference)
    try:
        found = _of_folder(path, given, command) if path.is_dir() else _of_file(path, given, command)
    except OSError as error:
        raise RecipeError(f"{error.filename or path} cannot be read ({error.strerror}): check it") from error
    return found._replace(flags={name: text for name, text in found.flags.items() if name not in given})


def _of_folder(path: Path, given: Mapping[str, str], command: str) -> Inferred:
    train = [file for kind in TABLES if (file := path / f"train{kind}").is_file()]
    if train:
        require(len(train) == 1, f"{path} has {format_list([file.name for file in train])}: name one of them")
        return _of_file(train[0], given, command)
    folder = path / "train" if (path / "train").is_dir() else path
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    kinds = Counter(file.suffix.lower() for file in islice(_files(path), MAX_ROWS))
    images, texts = (sum(kinds[kind] for kind in group) for group in (IMAGES, DOCUMENTS))
    if images > texts and len(classes) > 1:
        counts = {entry.name: sum(file.suffix.lower() in IMAGES for file in _files(entry)) for entry in classes}
        whole = folder == path or not any((path / part).is_dir() for part in ("val", "test"))
        flags = {"data.root": str(path)} | ({"data.val_fraction": HELD_OUT} if whole else {})
        return Inferred("image_folder", flags, f"images of {format_counts(counts)}")
    if texts and not images:
        more = " or more" if texts >= MAX_ROWS else ""
        return _documents(path, texts, f"documents in {texts:,} file{'s' * (texts > 1)}{more}")
    tables = sorted(file.name for file in path.iterdir() if file.suffix.lower() in TABLES)
    if tables:
        raise RecipeError(f"{path} has no train.csv, but {format_list(tables)}: trainer {command} {path / tables[0]}")
    wanted = "two or more class folders with images, train.csv, or .txt files"
    raise RecipeError(f"{path} has none of these: {wanted}. Give such a folder, or a file")


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))


def _documents(path: Path, count: int, data: str) -> Inferred:
    return Inferred("lm_chat", {"data": "Documents", "data.train_files": str(path)} | _held_out({}, count), data)


def _of_file(path: Path, given: Mapping[str, str], command: str) -> Inferred:
    if path.suffix.lower() not in TABLES:
        return _documents(path, 1, "one document")
    rows, columns, _ = first_rows(path, csv_format(given.get("data.encoding"), given.get("data.separator")))
    asks_text = any(name in given for name in ("data.text_column", "data.label_column", "model.task"))
    for names, start in () if asks_text else NAMED.items():
        fix = f"run trainer {command} {start} {shlex.quote(str(path))}"
        require(not {*names} <= {*columns}, f"{path} has columns {format_list(list(names))}: {fix}")
    if not asks_text and any(wanted <= {*columns} for wanted in CHATS):
        parts = _other_parts(path)
        flags = {f"data.{part}_files": str(file) for part, file in parts.items()}
        return Inferred("lm_chat", flags | _held_out(parts, len(rows)), f"conversations, {_count(rows)}")
    return _of_texts(path, rows, columns, given, command)


def _of_texts(path: Path, rows: Rows, columns: Sequence[str], given: Mapping[str, str], command: str) -> Inferred:
    pair = next((names for names in PAIRS if {*names} <= {*columns}), None)
    text = given.get("data.text_column") or (pair[0] if pair else None)
    taken = {given.get("data.label_column"), given.get("data.pair_column"), pair[1] if pair else None}
    if text is None:
        candidates = _text_columns(rows, [name for name in columns if name not in taken])
        text = _one(path, "texts", "text_column", candidates, columns, command)
    taken |= {text}
    label = given.get("data.label_column")
    if label is None:
        candidates = _label_columns(rows, [name for name in columns if name not in taken])
        if not candidates and len(columns) == 1:
            found = _documents(path, len(rows), f"documents, {_count(rows)}")
            return found._replace(flags=found.flags | {"data.text_column": text})
        label = _one(path, "labels", "label_column", candidates, columns, command)
    parts = _other_parts(path)
    flags = {f"data.{part}_file": str(file) for part, file in parts.items()}
    flags |= {"data.text_column": text} | ({"data.pair_column": pair[1]} if pair else {}) | {"data.label_column": label}
    values = [row.get(label) for row in rows]
    task = given.get("model.task") or _task(values)
    flags |= {"model.task": task} if task != "single_label" else {}
    about = format_counts(Counter(map(str, values))) if task == "single_label" else f"task {task}"
    data = f"{_count(rows)}; text in column {text!r}, label in column {label!r}: {about}"
    return Inferred("text_files", flags | _held_out(parts, len(rows)), data)


def _one(path: Path, what: str, key: str, found: Sequence[str], columns: Sequence[str], command: str) -> str:
    """Return the only candidate; otherwise raise RecipeError with a command for each."""
    if len(found) == 1:
        return found[0]
    has = ", ".join(map(repr, columns))
    require(bool(found), f"{path}: no column looks like {what}; it has {has}: name one by --data.{key} NAME")
    flag = f"trainer {command} {shlex.quote(str(path))} --data.{key}"
    ways = " or ".join(f"{flag} {shlex.quote(name)}" for name in found[:3])
    raise RecipeError(f"{path}: {format_list(list(map(repr, found)))} can be the {what}: choose {ways}")


def _text_columns(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Return the columns that can be the text: called so, otherwise words that differ between rows."""
    named = [name for name in columns if name.casefold() in TEXT_NAMES]
    if named:
        return named
    cells = {name: [row[name] for row in rows if isinstance(row.get(name), str)] for name in columns}
    lengths = {name: sum(len(text.split()) for text in texts) / len(rows) for name, texts in cells.items()}
    longest = max(lengths.values(), default=0.0)
    # A column with less than half as many words is a title or a name.
    return [name for name, words in lengths.items() if words > 1.2 and words > longest / 2]


def _label_columns(rows: Rows, columns: Sequence[str]) -> list[str]:
    """Return the columns that can be the label: called so, the only one, or with few distinct values."""
    named = [name for name in columns if name.casefold() in LABEL_NAMES]
    if named or len(columns) == 1:
        return named or list(columns)
    distinct = {name: len({repr(row.get(name)) for row in rows}) for name in columns}
    return [name for name, count in distinct.items() if 2 <= count <= min(MAX_CLASSES, len(rows) // 2)]


def _task(values: Sequence[Any]) -> str:
    """Return the task for a column of labels: numbers with a fraction, several classes per row, or one class."""
    filled = [str(value) for value in values if value not in (None, "")]
    if (values and all(isinstance(value, list) for value in values)) or any("|" in value for value in filled):
        return "multi_label"
    return "regression" if is_continuous({*filled}) else "single_label"


def _other_parts(path: Path) -> dict[str, Path]:
    """Return the file of each part: ``path`` for training and, if it is called train, the files in its folder."""
    found = {"train": path}
    for part, names in PARTS.items() if path.stem.casefold() == "train" else ():
        for name in reversed(names):  # the first one wins
            if (file := path.with_name(f"{name}{path.suffix}")).is_file():
                found[part] = file
    return found


def _held_out(parts: Mapping[str, Path], count: int) -> dict[str, str]:
    return {} if "val" in parts or count < MIN_ROWS_TO_SPLIT else {"data.val_fraction": HELD_OUT}


def _count(rows: Rows) -> str:
    return f"{len(rows):,} rows" if len(rows) < MAX_ROWS else f"more than {MAX_ROWS - 1:,} rows"
