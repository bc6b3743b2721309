"""Parquet files read row group by row group: what is in them, and any row, with few groups in memory at a time."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from trainer.data.cache import checksum, content_of
from trainer.data.common import reason
from trainer.data.fingerprint import MOST_BYTES, Content
from trainer.data.rows import is_missing, require_moderate
from trainer.data.tokens import Padder, encode, require_text
from trainer.errors import RecipeError
from trainer.values import Groups

MOST_LABELS = 10_000
OPEN_FILES = 8
"""Files of which a process keeps the footer."""


@dataclass(frozen=True)
class Shard:
    """A file of a dataset.

    Args:
        path: its path.
        groups: the number and rows of each row group that has rows.
        columns: their names.
        digest: a hash of its content.
        labels: the different labels in it as text, where they were asked for.
    """

    path: str
    groups: Sequence[tuple[int, int]]
    columns: Sequence[str]
    digest: str
    labels: Sequence[str] = ()


def find_shards(paths: Sequence[Path], cache: Path, label_column: str | None = None) -> list[Shard]:
    """What is in Parquet files: read from their footers, and remembered in ``cache`` while they do not change.

    Args:
        paths: the files, in order.
        label_column: of which the different labels are asked for; ``None`` for none. It is read whole.

    Raises:
        RecipeError: naming the file that cannot be read.
    """
    total = sum(path.stat().st_size for path in paths)

    def describe(path: Path) -> str:
        size = path.stat().st_size
        most = math.inf if total <= MOST_BYTES else MOST_BYTES * size / total
        groups, columns, labels = _look_into(path, label_column)
        return json.dumps([groups, columns, checksum(path, most), labels])

    found = content_of(cache, paths, describe, "shards", label_column, total)
    return [Shard(str(path), *json.loads(text)) for path, text in zip(paths, found, strict=True)]


def _look_into(path: Path, label_column: str | None) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    try:
        with pq.ParquetFile(path) as file:
            metadata, columns = file.metadata, file.schema_arrow.names
            rows = [(group, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
            rows = [(group, count) for group, count in rows if count]
            for group, _ in rows:
                require_moderate(metadata.row_group(group), group)
            # A missing column is told by who knows the name of the setting.
            labels = _labels(file, [group for group, _ in rows], label_column) if label_column in columns else set()
    except Exception as error:  # pyarrow raises OSError and ArrowInvalid, and others for damaged files
        raise _unreadable(str(path), error) from error
    return rows, columns, sorted(labels)


def _labels(file: pq.ParquetFile, groups: Sequence[int], column: Any) -> set[str]:
    labels: set[str] = set()
    for group in groups:
        values = pc.unique(_read(file, group, [column]).column(0)).to_pylist()
        labels |= {str(value) for value in values if value is not None}
        if len(labels) > MOST_LABELS:  # it is refused anyway
            break
    return labels


def _read(file: pq.ParquetFile, group: int, columns: Sequence[str]) -> pa.Table:
    # Without threads of its own: a process that was forked has none of those that its parent had.
    return file.read_row_group(group, columns=list(columns), use_threads=False)


def _unreadable(place: str, error: BaseException) -> RecipeError:
    return RecipeError(
        f"{place} cannot be read as Parquet ({reason(error)}): it is damaged or was not written to its end; write it "
        "again or remove it"
    )


@dataclass
class ShardReader:
    """The rows of all shards by their number, shard after shard.

    Args:
        shards: the files.
        columns: what to read of each.
        most_rows: rows of the row groups that are kept decoded, besides those of the last one read.
    """

    shards: Sequence[Shard]
    columns: Sequence[str]
    most_rows: int
    decoded: int = 0
    _tables: OrderedDict[int, pa.Table] = field(default_factory=OrderedDict, repr=False)
    _files: OrderedDict[str, pq.ParquetFile] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        self.places = [(shard, group) for shard, found in enumerate(self.shards) for group, _ in found.groups]
        self.sizes = tuple(count for shard in self.shards for _, count in shard.groups)
        self.starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned: without what is open."""
        return self.__dict__ | {"_tables": OrderedDict(), "_files": OrderedDict()}

    def row(self, index: int) -> tuple[Any, ...]:
        """The values of ``columns`` of the row ``index``.

        Raises:
            RecipeError: naming the file and row group that cannot be read.
        """
        number = bisect_right(self.starts, index) - 1
        table = self._table(number)
        return tuple(column[index - self.starts[number]].as_py() for column in table.columns)

    def column(self, number: int, name: str) -> pa.ChunkedArray:
        """A column of the ``number``-th row group."""
        return self._table(number).column(name)

    def describe(self, index: int) -> str:
        """The file of a row, and its number there."""
        number = bisect_right(self.starts, index) - 1
        shard, group = self.places[number]
        before = sum(count for other, count in self.shards[shard].groups if other < group)
        row = before + index - self.starts[number] + 1
        return f"{self.shards[shard].path} row {row} (the first is row 1)"

    def _table(self, number: int) -> pa.Table:
        if number in self._tables:
            self._tables.move_to_end(number)
            return self._tables[number]
        table = self._decode(number)
        self._tables[number] = table
        rows = sum(len(kept) for kept in self._tables.values())
        while rows > self.most_rows + len(table):
            rows -= len(self._tables.popitem(last=False)[1])
        return table

    def _decode(self, number: int) -> pa.Table:
        shard, group = self.places[number]
        path = self.shards[shard].path
        try:
            table = _read(self._file(path), group, self.columns)
        except Exception as error:
            raise _unreadable(f"{path} row group {group} (the first is 0)", error) from error
        if len(table) != self.sizes[number]:
            raise RecipeError(
                f"{path} row group {group} has {len(table)} rows instead of {self.sizes[number]}: the file has changed "
                "since the run began; start it again"
            )
        self.decoded += 1
        return table

    def _file(self, path: str) -> pq.ParquetFile:
        if path not in self._files:
            self._files[path] = pq.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(path)
        return self._files[path]


# One split of streamed texts: rows of Parquet files, tokenised when they are asked for.

MOST_LONGEST = 1024


class StreamedSplit:
    """The samples of all shards, one after the other.

    Args:
        shards: the files.
        text_column: column of the texts.
        label_column: column of the labels.
        classes: the class of every label, as text.
        pad: makes batches; it knows the tokenizer.
        mixed: samples that are shuffled with each other, at least.
    """

    augmented = False

    def __init__(
        self,
        shards: Sequence[Shard],
        text_column: str,
        label_column: str,
        classes: Mapping[str, int],
        pad: Padder,
        mixed: int,
    ) -> None:
        self.columns, self.classes, self.pad = (text_column, label_column), classes, pad
        self.reader = ShardReader(shards, self.columns, mixed)
        self.reader.most_rows = 2 * (mixed + max(self.reader.sizes))  # a batch may be of two stretches
        self.groups = Groups(self.reader.sizes, mixed)

    @property
    def longest(self) -> list[int]:
        """The samples of the first row group by the length of their text, the longest first."""
        try:
            lengths = pc.utf8_length(self.reader.column(0, self.columns[0]))
        except (RecipeError, pa.ArrowException):  # told when it is their turn, where they may be allowed to be bad
            return []
        order = pc.array_sort_indices(lengths.combine_chunks(), order="descending", null_placement="at_end")
        return order[:MOST_LONGEST].to_pylist()

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, label = self._row(index)
        return {key: ids[0] for key, ids in self._encode([text]).items()} | {"labels": label}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A whole batch at once."""
        rows = [self._row(index) for index in indices]
        return self.pad({**self._encode([text for text, _ in rows]), "labels": [label for _, label in rows]})

    def _encode(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        return encode(texts, self.pad.tokenizer, self.pad.max_length)

    def _row(self, index: int) -> tuple[str, int]:
        """The text of a sample, and its class.

        Raises:
            RecipeError: naming the row that has no text, or no known label.
        """
        text, label = self.reader.row(index)
        text_column, label_column = self.columns
        require_text(text, partial(self.describe, index), self.pad.max_length, text_column)
        if is_missing(label):
            raise RecipeError(f"{self.describe(index)} has no {label_column}: add it or remove the row")
        if str(label) not in self.classes:
            raise RecipeError(
                f"{self.describe(index)}: {label_column} {str(label)!r} is not one of {', '.join(self.classes)}: mend "
                "it, or give all labels in data.classes"
            )
        return text, self.classes[str(label)]

    def describe(self, index: int) -> str:
        return self.reader.describe(index)

    def fingerprint(self) -> str:
        """Of the files, in order (every byte, of more than 1 GiB spread blocks), and how they are read."""
        digests = [shard.digest for shard in self.reader.shards]
        return Content("shards", digests, self.columns, dict(self.classes), self.pad.settings).hexdigest()

    def files(self) -> dict[str, str]:
        """A short hash of every file, by its path within the folder of all."""
        paths = [Path(shard.path) for shard in self.reader.shards]
        folder = os.path.commonpath([path.parent for path in paths])
        digests = [shard.digest[:16] for shard in self.reader.shards]
        return dict(zip([str(path.relative_to(folder)) for path in paths], digests, strict=True))
