"""Parquet shards that tests stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CLASSES = ["a", "b", "c"]
WORDS = ["film", "good", "bad", "dull", "great", "the", "was", "very", "not", "story", "actor", "music", "end", "long"]


def text_of(index: int) -> str:
    """A text that says which it is, of some words."""
    return " ".join([str(index), *(WORDS[(index * 7 + k * k) % len(WORDS)] for k in range(1 + index * 5 % 23))])


def write_shards(
    folder: Path,
    shards: int,
    rows: int,
    group: int,
    text: Callable[[int], str] = text_of,
    label: Callable[[int], Any] = lambda index: CLASSES[index % len(CLASSES)],
) -> Path:
    """``shards`` files of ``rows`` rows each, in row groups of ``group``; return ``folder``."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        indices = range(shard * rows, (shard + 1) * rows)
        table = pa.table({"text": [text(i) for i in indices], "label": [label(i) for i in indices]})
        pq.write_table(table, folder / f"part-{shard:02d}.parquet", row_group_size=group, write_page_checksum=True)
    return folder
