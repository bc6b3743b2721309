"""Parquet files, read with limits on what they expand to. Imports neither datasets nor pandas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trainer.data.base import MAX_LINE_BYTES
from trainer.errors import RecipeError, require

MAX_DECODED_BYTES = 4_000_000_000
"""Max bytes of the decoded texts of a row group, which are in memory at once."""

MAX_COMPRESSION_RATIO, VALUES_PER_BYTE, MAX_VALUES = 1_000, 100, 500_000
"""Max ratio of unpacked to packed bytes of a Parquet column, of its values to the bytes of the file, and max texts per
row in a column of lists."""


def text_columns(metadata: pq.FileMetaData) -> list[str]:
    """Return the paths of all columns of texts or bytes, including those within lists and structs."""
    columns = map(metadata.schema.column, range(metadata.num_columns))
    return [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]


def open_parquet(path: Path | str, **options: Any) -> pq.ParquetFile:
    """Open a file with dictionary-encoded texts, each in memory once. Arrow's extension types would decode them."""
    metadata = pq.read_metadata(path)
    texts = text_columns(metadata)
    return pq.ParquetFile(path, metadata=metadata, read_dictionary=texts, arrow_extensions_enabled=False, **options)


def require_sane_growth(path: Path, metadata: pq.FileMetaData) -> None:
    """Reject a file with a column that would expand excessively according to the footer."""
    values, most = [0] * metadata.num_columns, max(1_000_000, VALUES_PER_BYTE * path.stat().st_size)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for at, column in enumerate(map(group.column, range(group.num_columns))):
            unpacked, packed, name = column.total_uncompressed_size, column.total_compressed_size, column.path_in_schema
            place, values[at] = f"{path} row group {number}: {name}", values[at] + column.num_values
            grown = f"{place} of {packed:,} bytes would be unpacked to {unpacked:,}: write the file again, or remove it"
            require(unpacked <= max(MAX_LINE_BYTES, MAX_COMPRESSION_RATIO * packed), grown)
            many = f"{path}: {name} has more than {most:,} values, too many for the size of the file"
            require(values[at] <= most, f"{many}: remove the file")
            size = column.num_values * max(8, metadata.schema.column(at).length)
            require(size <= MAX_DECODED_BYTES, f"{place} would be decoded to {size:,} bytes: write smaller row groups")


def read_group(path: Path | str, file: pq.ParquetFile, group: int, columns: Sequence[str]) -> pa.Table:
    """Read ``columns`` of a row group of :func:`open_parquet`; reject texts and lists that would exhaust memory."""
    # Arrow's own threads do not survive a fork.
    table = file.read_row_group(group, columns=list(columns), use_threads=False)
    before = sum(file.metadata.row_group(other).num_rows for other in range(group))
    for column, chunks in zip(table.column_names, table.columns, strict=True):
        row, decoded = before, 0
        for chunk in chunks.chunks:
            for name, texts, starts in _texts_of(f"{path} row group {group}", column, chunk, np.arange(len(chunk) + 1)):
                sizes = np.append(pc.binary_length(texts.dictionary).to_numpy(zero_copy_only=False), 0)  # null is last
                ends = np.append(0, np.cumsum(sizes[texts.indices.fill_null(len(sizes) - 1)], dtype=np.int64))
                decoded += int(ends[-1])
                totals = {"values": (np.diff(starts), MAX_VALUES), "bytes": (np.diff(ends[starts]), MAX_LINE_BYTES)}
                for what, (counts, most) in totals.items():
                    for at in np.flatnonzero(counts > most):
                        told = f"{path} row {row + at + 1} (the first is row 1): {name} has {counts[at]:,} {what}"
                        raise RecipeError(f"{told}, and the max is {most:,}: split or remove the row")
            row += len(chunk)
        large = f"{path} row group {group}: {column} would be decoded to {decoded:,} bytes"
        require(decoded <= MAX_DECODED_BYTES, f"{large}: write smaller row groups")
    return table


def _texts_of(place: str, name: str, array: Any, starts: np.ndarray) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Yield the texts of each field of a column; row ``i`` has those from ``starts[i]`` to ``starts[i + 1]``."""
    kind, types = array.type, pa.types
    if types.is_struct(kind):
        for number, field in enumerate(kind):
            yield from _texts_of(place, f"{name}.{field.name}", array.field(number), starts)
    elif types.is_fixed_size_list(kind):
        yield from _texts_of(place, name, array.values, (starts + array.offset) * kind.list_size)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        yield from _texts_of(place, name, array.values, array.offsets.to_numpy()[starts])
    elif types.is_dictionary(kind):
        yield name, array, starts
    else:  # such as a text column with the same path as another, which Arrow would decode
        known = types.is_primitive, types.is_null, types.is_decimal, types.is_fixed_size_binary
        if not any(check(kind) for check in known):
            raise RecipeError(f"{place}: {name} cannot be checked as {kind}: rename it, or write it as text")
