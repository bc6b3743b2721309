"""One split of streamed texts: rows of Parquet files, tokenised when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from trainer.contract import Groups
from trainer.data.content import Content
from trainer.data.rows import is_missing
from trainer.data.shards import Shard, ShardReader
from trainer.data.tokens import Padder, encode, require_text
from trainer.errors import RecipeError

MOST_LONGEST = 1024


class Stream:
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
