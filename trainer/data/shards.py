"""Random access to rows of Parquet files, with few row groups in memory at a time."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from trainer.contract import Samples
from trainer.data.base import explain_faults
from trainer.data.cache import MAX_HASHED_BYTES, checksum, inspect_cached
from trainer.data.fingerprint import ContentHasher
from trainer.data.parquet_files import open_parquet, read_group, require_sane_growth
from trainer.data.tokens import Padder, encode, require_label, require_text
from trainer.errors import RecipeError, format_list, require
from trainer.values import ShuffleGroups

MAX_LABELS = 10_000
MAX_LONGEST_SAMPLES = 1024  # max candidates for the longest samples
MAX_OPEN_FILES = 8  # per process
DAMAGED = "it is damaged or incomplete; write it again or remove it"


@dataclass(frozen=True)
class Shard:
    """A file of a dataset: index and number of rows of each row group with rows, and the distinct labels if needed."""

    path: str
    groups: Sequence[tuple[int, int]]
    columns: Sequence[str]
    digest: str
    labels: Sequence[str] = ()


def find_shards(paths: Sequence[Path], cache: Path, label_column: str | None = None) -> list[Shard]:
    """Read the footers of Parquet files, cached in ``cache``, and the distinct labels of ``label_column``, if given."""
    total = sum(path.stat().st_size for path in paths)

    def look(path: Path) -> list[Any]:
        most = math.inf if total <= MAX_HASHED_BYTES else MAX_HASHED_BYTES * path.stat().st_size / total
        groups, columns, labels = _read_footer(path, label_column)
        return [groups, columns, checksum(path, most), labels]

    found = inspect_cached(cache, paths, lambda files: list(map(look, files)), "parquet", label_column, total)
    return [Shard(str(path), *answer) for path, answer in zip(paths, found, strict=True)]


def require_rows(key: str, shards: Sequence[Shard]) -> None:
    require(any(shard.groups for shard in shards), f"{key}: no rows in {format_list([shard.path for shard in shards])}")


def _read_footer(path: Path, label_column: str | None) -> tuple[list[tuple[int, int]], list[str], list[str]]:
    labels: set[str] = set()
    with explain_faults(f"{path} cannot be read as Parquet", DAMAGED), open_parquet(path) as file:
        metadata, columns = file.metadata, file.schema_arrow.names
        require_sane_growth(path, metadata)
        rows = [(group, metadata.row_group(group).num_rows) for group in range(metadata.num_row_groups)]
        rows = [(group, count) for group, count in rows if count]
        for group, _ in rows:
            # The caller knows the name of the setting, so it reports a missing column and rejects too many labels.
            if label_column is not None and label_column in columns and len(labels) <= MAX_LABELS:
                values = pc.unique(read_group(path, file, group, [label_column]).column(0)).to_pylist()
                labels |= {str(value) for value in values if value is not None}
    return rows, columns, sorted(labels)


class ShardReader:
    """Reads ``columns`` by row number over all shards. Keeps row groups of up to ``max_rows`` rows, and the last."""

    def __init__(self, shards: Sequence[Shard], columns: Sequence[str], max_rows: int) -> None:
        self.shards, self.columns, self.max_rows, self.decoded = shards, columns, max_rows, 0
        self._tables: OrderedDict[int, pa.Table] = OrderedDict()
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self.places = [(shard, group) for shard, found in enumerate(shards) for group, _ in found.groups]
        self.sizes = tuple(count for shard in shards for _, count in shard.groups)
        self.starts = [0, *accumulate(self.sizes)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned process, without open files and tables."""
        return self.__dict__ | {"_tables": OrderedDict(), "_files": OrderedDict()}

    def row(self, index: int) -> tuple[Any, ...]:
        """Return the values of ``columns`` in a row."""
        number = bisect_right(self.starts, index) - 1
        return tuple(column[index - self.starts[number]].as_py() for column in self.table(number).columns)

    def describe(self, index: int) -> str:
        """Return the file of a row, and its number there."""
        number = bisect_right(self.starts, index) - 1
        shard, group = self.places[number]
        before = sum(count for other, count in self.shards[shard].groups if other < group)
        return f"{self.shards[shard].path} row {before + index - self.starts[number] + 1} (the first is row 1)"

    def table(self, number: int) -> pa.Table:
        """Return a row group, from memory if possible."""
        if number not in self._tables:
            self._tables[number] = table = self._decode(number)
            rows = sum(map(len, self._tables.values()))
            while rows > self.max_rows + len(table):
                rows -= len(self._tables.popitem(last=False)[1])
        self._tables.move_to_end(number)
        return self._tables[number]

    def _decode(self, number: int) -> pa.Table:
        shard, group = self.places[number]
        path = self.shards[shard].path
        with explain_faults(f"{path} row group {group} (the first is 0) cannot be read as Parquet", DAMAGED):
            table = read_group(path, self._file(path), group, self.columns)
        cause = f"{path} row group {group} has {len(table)} rows instead of {self.sizes[number]}"
        require(len(table) == self.sizes[number], f"{cause}: the file has changed since the run began; restart the run")
        self.decoded += 1
        return table

    def _file(self, path: str) -> pq.ParquetFile:
        if path not in self._files:
            self._files[path] = open_parquet(path, pre_buffer=False, page_checksum_verification=True)
            if len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(path)
        return self._files[path]


class RowEncoder(Protocol):
    """Protocol of encoders, which convert rows to columns such as ``input_ids`` and ``labels``, one entry per row."""

    columns: Sequence[str]
    """The columns to read, the one with the longest text first."""
    settings: Any
    """Everything except the tokenizer that determines the samples."""

    def __call__(self, rows: Sequence[tuple[Any, ...]], places: Sequence[Callable[[], str]]) -> Mapping[str, list[Any]]:
        """Encode rows. Raises ``RecipeError`` with the place of an invalid row."""


class TokenizedWithLabels:
    """The encoder of texts with one label each; ``classes`` maps label texts to numbers."""

    def __init__(self, columns: Sequence[str], classes: Mapping[str, int], pad: Padder) -> None:
        self.columns, self.settings, self.pad = columns, dict(classes), pad

    def __call__(self, rows: Sequence[tuple[Any, ...]], places: Sequence[Callable[[], str]]) -> Mapping[str, list[Any]]:
        for (text, label), place in zip(rows, places, strict=True):
            require_text(text, place, self.pad.max_length, self.columns[0])
            require_label(label, place, self.columns[1])
            if str(label) not in self.settings:
                unknown = f"{self.columns[1]} {str(label)!r} is not one of {', '.join(self.settings)}"
                raise RecipeError(f"{place()}: {unknown}: fix it, or give all labels in data.classes")
        tokens = encode([text for text, _ in rows], self.pad.tokenizer, self.pad.max_length)
        return {**tokens, "labels": [self.settings[str(label)] for _, label in rows]}


class StreamedSplit(Samples):
    """The samples that ``encode`` makes from all shards in order; at least ``mixed`` are shuffled with each other."""

    def __init__(self, shards: Sequence[Shard], encode: RowEncoder, pad: Padder, mixed: int) -> None:
        self.encode, self.pad = encode, pad
        most = max(count for shard in shards for _, count in shard.groups)
        self.reader = ShardReader(shards, encode.columns, 2 * (mixed + most))  # a batch may span two shuffle blocks
        self.groups = ShuffleGroups(self.reader.sizes, mixed)

    @property
    def longest(self) -> Sequence[int]:  # type: ignore[override]
        """The samples of the first row group, sorted by the length of their text, the longest first."""
        try:
            cells = self.reader.table(0).column(self.encode.columns[0])
            if pa.types.is_nested(cells.type):  # use the length of all messages
                cells = pa.chunked_array([list(map(str, cells.to_pylist()))], pa.large_string())
            lengths = pc.utf8_length(cells.cast(pa.large_string()))
        except (RecipeError, pa.ArrowException):  # reported when they are loaded, where bad samples may be allowed
            return []
        order = pc.array_sort_indices(lengths.combine_chunks(), order="descending", null_placement="at_end")
        return order[:MAX_LONGEST_SAMPLES].to_pylist()

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: values[0] for key, values in self._encoded([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self.pad(self._encoded(indices))

    def _encoded(self, indices: Sequence[int]) -> Mapping[str, list[Any]]:
        rows = [self.reader.row(index) for index in indices]
        return self.encode(rows, [partial(self.describe, index) for index in indices])

    def describe(self, index: int) -> str:
        return self.reader.describe(index)

    def fingerprint(self) -> str:
        """Hash the files, in order (every byte; above 1 GiB evenly spread blocks), and the settings of reading."""
        digests = [shard.digest for shard in self.reader.shards]
        reading = self.encode.columns, self.encode.settings, self.pad.settings
        return ContentHasher("shards", digests, *reading).hexdigest()

    def files(self) -> dict[str, str]:
        """Return a short hash of every file, by its path relative to the common folder."""
        folder = os.path.commonpath([os.path.dirname(shard.path) for shard in self.reader.shards])
        return {os.path.relpath(shard.path, folder): shard.digest[:16] for shard in self.reader.shards}
