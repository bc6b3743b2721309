"""Texts that need not fit in memory or be tokenised before training: Parquet files, read as they are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.common import local_path
from trainer.data.text import Texts, sort_classes
from trainer.errors import require, require_positive

if TYPE_CHECKING:
    from trainer.data.shards import Shard, StreamedSplit


@dataclass
class StreamedText(Texts):
    """Texts with one label each in Parquet files of any number and size, tokenised when it is their turn.

    Only Parquet: its files say where each row is, so any step of any epoch can be found without reading all before it.

    Args:
        train_files: the training texts: a folder of .parquet files, or a pattern such as shards/train-*.parquet; taken
            in the order of their names.
        val_files: texts for validation (optional).
        test_files: texts for testing (optional).
        text_column: column of the texts.
        label_column: column of the labels: integers or strings.
        classes: the labels, as texts, in the order of their classes; by default those that the training files have,
            sorted, numbers by value.
        max_length: tokens that a text is cut to.
        shuffle_buffer: samples that are shuffled with each other, at least; about as many texts are held in memory.
        cache_dir: folder that remembers what is in the files; by default that of the datasets library.
        workers: processes that load data; 0 loads in the main process.
        worker_timeout: seconds that a micro-batch may take a worker, before it counts as hung and ends the run.
        max_bad_samples: samples that may be left out, over all ranks, because they cannot be loaded.
    """

    train_files: str
    val_files: str | None = None
    test_files: str | None = None
    text_column: str = "text"
    label_column: str = "label"
    classes: list[str] | None = None
    max_length: int = 512
    shuffle_buffer: int = 10_000
    cache_dir: str | None = None
    workers: int = 0
    worker_timeout: float = 300.0
    max_bad_samples: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data.shuffle_buffer", self.shuffle_buffer)

    def prepare(self, tokenizer: Any = None) -> None:
        """Look into the files; texts are read and tokenised later.

        Raises:
            RecipeError: naming the file or column that will not do.
        """
        from trainer.data.shards import MOST_LABELS
        from trainer.data.tokens import Padder, check_tokenizer

        check_tokenizer(tokenizer, self.max_length)
        found = {part: self._find(part) for part in ("train", "val", "test") if getattr(self, f"{part}_files")}
        if self.classes is None:
            names = {label for shard in found["train"] for label in shard.labels}
            require(len(names) > 0, f"data.label_column={self.label_column!r}: no row of the training files has one")
            self._set_classes(sort_classes(names))
        else:
            require(
                len(set(self.classes)) == len(self.classes), "data.classes holds a label twice: give each label once"
            )
            self._set_classes(self.classes)
        require(self.num_classes > 1, f"data.train_files={self.train_files!r}: there is only {self.class_names}")
        require(
            self.num_classes <= MOST_LABELS,
            f"data.label_column={self.label_column!r} has more than {MOST_LABELS:,} different labels: name the column "
            "of the classes",
        )
        numbers = {name: number for number, name in enumerate(self.class_names)}
        self._pad = Padder(tokenizer, self.max_length)
        splits = {part: self._stream(part, shards, numbers) for part, shards in found.items()}
        self.train, self.val, self.test = splits["train"], splits.get("val"), splits.get("test")

    def _find(self, part: str) -> list[Shard]:
        from trainer.data.cache import cache_folder
        from trainer.data.rows import check_columns
        from trainer.data.shards import find_shards

        pattern = getattr(self, f"{part}_files")
        asked = self.label_column if part == "train" and self.classes is None else None
        shards = find_shards(_files(f"data.{part}_files", pattern), cache_folder(self.cache_dir), asked)
        for shard in shards:
            check_columns(shard.path, shard.columns, text_column=self.text_column, label_column=self.label_column)
        require(any(shard.groups for shard in shards), f"data.{part}_files={pattern!r}: the files have no rows")
        return shards

    def _stream(self, part: str, shards: list[Shard], classes: Mapping[str, int]) -> StreamedSplit:
        from trainer.data.shards import StreamedSplit

        # What is evaluated is read from the first row to the last: one row group at a time is enough.
        mixed = self.shuffle_buffer if part == "train" else 1
        return StreamedSplit(shards, self.text_column, self.label_column, classes, self._pad, mixed)


def _files(key: str, pattern: str) -> Sequence[Path]:
    path = local_path(pattern)
    require(
        "://" not in pattern.removeprefix("file://"),
        f"{key}={pattern!r} is no local path: download the files first (hf download for those of the hub)",
    )
    if path.is_dir():
        found = sorted(path.glob("*.parquet"))
        require(len(found) > 0, f"{key}={pattern!r}: the folder {path} holds no .parquet files")
        return found
    found = sorted(Path(name) for name in glob(str(path), recursive=True))
    require(len(found) > 0, f"{key}={pattern!r}: there is no such folder or file")
    others = [name for name in found if name.suffix != ".parquet"]
    require(
        not others,
        f"{key}={pattern!r}: {others[0] if others else ''} is no .parquet file: of csv, jsonl and txt nobody knows "
        "where a row is without reading all before it; write them as Parquet first (docs/data.md shows how)",
    )
    return found
