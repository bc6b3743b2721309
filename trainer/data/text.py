"""Text datasets. Every batch is int64: ``input_ids`` and ``attention_mask`` ``(n, length)``, ``labels`` ``(n,)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.contract import Data
from trainer.data.common import check_loading, hold_out, local_path, require_fraction
from trainer.errors import RecipeError, require, require_positive

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset
    from numpy import ndarray
    from torch import Tensor

    from trainer.data.rows import Rows


class Texts(Data):
    """What all text datasets share: checks, padding, classes."""

    num_classes: int
    class_names: list[str]
    max_length: int
    text_column: str
    label_column: str
    cache_dir: str | None

    _pad: Any = None

    def __post_init__(self) -> None:
        require_positive("data.max_length", self.max_length)
        check_loading(self)
        require(
            self.text_column != self.label_column,
            f"data.text_column and data.label_column are both {self.text_column!r}: they must differ",
        )

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Pad samples of a prepared dataset to a batch."""
        require(self._pad is not None, f"{type(self).__name__}: call prepare(tokenizer) before collate")
        return self._pad(samples)

    def encode(self, texts: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
        """Make a batch, without labels, of any texts: tokenised, truncated and padded as the dataset's own.

        Raises:
            RecipeError: for a text that is empty, naming its position.
        """
        from trainer.data.tokens import Padder, check_tokenizer, encode, require_text

        check_tokenizer(tokenizer, self.max_length)
        require(len(texts) > 0, "no texts were given")
        for position, text in enumerate(texts, start=1):
            require(bool(text.strip()), f"text {position} (the first is 1) is empty")
            require_text(text, partial("text {} (the first is 1)".format, position), self.max_length, "--text")
        return Padder(tokenizer, self.max_length)(encode(texts, tokenizer, self.max_length))

    def _set_classes(self, names: Sequence[str]) -> None:
        self.class_names = list(names)
        self.num_classes = len(self.class_names)


class _Tokenised(Texts):
    """What the text datasets share that are tokenised before training."""

    val_fraction: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fraction("data.val_fraction", self.val_fraction)

    def prepare(self, tokenizer: Any = None) -> None:
        """Read, check and tokenise; what was tokenised before is taken from the cache.

        Raises:
            RecipeError: naming the file, column or row that will not do.
        """
        from trainer.data.cache import cache_folder
        from trainer.data.tokens import Padder, Tokens, check_tokenizer, label_texts, tokenise

        check_tokenizer(tokenizer, self.max_length)
        cache = cache_folder(self.cache_dir)
        found = self._find(cache)
        tables = {
            part: tokenise(rows, self.text_column, self.label_column, tokenizer, self.max_length, cache)
            for part, rows in found.items()
        }
        classes = self._classes(found["train"].source, label_texts(tables["train"]))
        self._pad = Padder(tokenizer, self.max_length)
        splits = {
            part: Tokens(table, self._label(found[part], table, classes), found[part], self._pad)
            for part, table in tables.items()
        }
        self.train, self.val, self.test = splits["train"], splits.get("val"), splits.get("test")
        if self.val_fraction:
            kept, held = hold_out(splits["train"].labels, self.val_fraction, "data.val_fraction")
            self.train, self.val = splits["train"].select(kept), splits["train"].select(held)

    def _find(self, cache: Path) -> dict[str, Rows]:
        """The rows of every split that there is."""
        raise NotImplementedError

    def _classes(self, source: str, labels: Sequence[str]) -> dict[str, int]:
        """The class of every label text of the training data; sets ``class_names`` and ``num_classes``."""
        raise NotImplementedError

    def _label(self, rows: Rows, table: Dataset, classes: Mapping[str, int]) -> ndarray:
        from trainer.data.tokens import label_numbers

        numbers = label_numbers(table, classes)
        if len(unknown := (numbers < 0).nonzero()[0]):
            index = int(unknown[0])
            raise RecipeError(
                f"{rows.describe(index)}: {self.label_column} {table[index]['label_text']!r} is not one of "
                f"{', '.join(classes)}, the labels of the training data"
            )
        return numbers


def sort_classes(labels: Iterable[str]) -> list[str]:
    """The different labels in order, numbers by value."""
    names = set(labels)
    numbers = all(name.removeprefix("-").isdecimal() and len(name) < 20 for name in names)
    return sorted(names, key=int) if numbers else sorted(names)


@dataclass
class IMDb(_Tokenised):
    """IMDb film reviews, negative (0) or positive (1): 25,000 for training, 25,000 for testing.

    Args:
        root: a dataset on the Hugging Face hub; or a folder, or file:// URL of one, that holds train.csv and test.csv
            or is an unpacked aclImdb (train/pos, train/neg, test/pos, test/neg).
        max_length: tokens that a review is cut to.
        val_fraction: share of the training reviews held out for validation; always the same reviews.
        text_column: column of the reviews.
        label_column: column of the labels: 0 or 1, or negative or positive.
        cache_dir: folder of the cache for tokens; by default that of the datasets library.
        workers: processes that load data; 0 loads in the main process.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    root: str = "stanfordnlp/imdb"
    max_length: int = 512
    val_fraction: float = 0.0
    text_column: str = "text"
    label_column: str = "label"
    cache_dir: str | None = None
    workers: int = 0
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    def _find(self, cache: Path) -> dict[str, Rows]:
        from trainer.data.rows import find_file, find_folders, find_hub

        root = local_path(self.root)
        parts = ("train", "test")
        if not root.is_dir():
            looks_local = self.root.startswith((".", "/", "~", "file:")) or self.root.count("/") != 1
            require(not looks_local, f"data.root={self.root!r}: there is no folder {root}")
            return find_hub(self.root, self.cache_dir)
        if (root / "train.csv").is_file():
            return {part: find_file(root / f"{part}.csv", cache) for part in parts}
        require(
            (root / "train" / "pos").is_dir(),
            f"data.root={self.root!r}: {root} holds neither train.csv nor train/pos: set it to a folder with train.csv "
            "and test.csv, to an unpacked aclImdb folder, or to stanfordnlp/imdb",
        )
        return {part: find_folders(root, part, (("neg", 0), ("pos", 1)), cache) for part in parts}

    def _classes(self, source: str, labels: Sequence[str]) -> dict[str, int]:
        self._set_classes(["negative", "positive"])
        return {"0": 0, "1": 1, "negative": 0, "positive": 1}


@dataclass
class TextFiles(_Tokenised):
    """Texts of one's own with one label each, in .csv, .parquet or .jsonl files.

    Classes are the distinct labels of the training file in sorted order, numbers by value.

    Args:
        train_file: the training texts: a path or file:// URL.
        val_file: texts for validation (optional).
        test_file: texts for testing (optional).
        text_column: column of the texts.
        label_column: column of the labels: integers or strings.
        max_length: tokens that a text is cut to.
        val_fraction: share of the training texts held out for validation when there is no val_file.
        cache_dir: folder of the cache for tokens; by default that of the datasets library.
        workers: processes that load data; 0 loads in the main process.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    train_file: str
    val_file: str | None = None
    test_file: str | None = None
    text_column: str = "text"
    label_column: str = "label"
    max_length: int = 512
    val_fraction: float = 0.0
    cache_dir: str | None = None
    workers: int = 0
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.val_file is None or self.val_fraction == 0,
            f"data.val_file={self.val_file!r} and data.val_fraction={self.val_fraction} exclude each other: give one",
        )

    def _find(self, cache: Path) -> dict[str, Rows]:
        from trainer.data.rows import find_file

        files = {"train": self.train_file, "val": self.val_file, "test": self.test_file}
        found = {}
        for part, file in files.items():
            if file is not None:
                require(local_path(file).is_file(), f"data.{part}_file={file!r}: there is no file {local_path(file)}")
                found[part] = find_file(local_path(file), cache)
        return found

    def _classes(self, source: str, labels: Sequence[str]) -> dict[str, int]:
        self._set_classes(sort_classes(labels))
        require(self.num_classes > 1, f"{source}: every {self.label_column} is {self.class_names[0]!r}")
        return {name: index for index, name in enumerate(self.class_names)}
