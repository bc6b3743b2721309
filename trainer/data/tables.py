"""The content of tables on disk, block by block, however they are chunked in their files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.data.content import Content

MOST_BYTES = 1 << 30
"""A table is read whole up to this size, in a few seconds; of a larger one, a part of this size."""

BLOCK = 1024
"""Rows that are read at once."""


def spread(size: int, count: int) -> list[int]:
    """Up to ``count`` evenly spread numbers from 0 to ``size`` - 1, the first and the last among them."""
    if size <= count:
        return list(range(size))
    return [number * (size - 1) // (count - 1) for number in range(count)]


def blocks(size: int, total_bytes: int, most_bytes: int = MOST_BYTES) -> list[range]:
    """Rows to read of ``size`` that take ``total_bytes``: blocks of them, all or evenly spread ones."""
    count = -(-size // BLOCK)
    wanted = count if total_bytes <= most_bytes else max(2, count * most_bytes // total_bytes)
    return [range(block * BLOCK, min((block + 1) * BLOCK, size)) for block in spread(count, wanted)]


def add_rows(content: Content, table: Any, rows: Sequence[int]) -> None:
    """Feed the ``rows`` of a ``datasets.Dataset``: columns, types and values, missing ones too."""
    found = table.with_format("arrow")[rows]
    for name in found.column_names:
        content.add(name)
        _add_array(content, found.column(name).combine_chunks())


def _add_array(content: Content, array: Any) -> None:
    import pyarrow as pa  # here: few runs need it to begin
    import pyarrow.compute as pc

    kind = array.type
    content.add(str(kind))
    content.add(array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None)
    if isinstance(array, pa.ExtensionArray):
        _add_array(content, array.storage)
    elif pa.types.is_dictionary(kind):
        _add_array(content, array.dictionary_decode())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        content.add(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False))
        _add_array(content, array.flatten())
    elif pa.types.is_struct(kind):
        for position, part in enumerate(array.flatten()):
            content.add(kind.field(position).name)
            _add_array(content, part)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        content.add(array.fill_null(False if pa.types.is_boolean(kind) else 0).to_numpy(zero_copy_only=False))
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        content.add(array.to_pylist())
    else:
        content.add(repr(array.to_pylist()))
