"""Labels of texts other than a single class: read from cells, stored as JSON, converted to training labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import isfinite
from typing import TYPE_CHECKING, Any

from trainer.errors import RecipeError, require
from trainer.values import IGNORED_LABEL, Task

if TYPE_CHECKING:
    from datasets import Dataset

SEPARATOR = "|"  # between the labels, or numbers, of a cell of text


def parse_labels(cell: Any, place: Callable[[], str], column: str) -> list[str]:
    """Return the labels of a cell: a list, or a text with ``|`` between them; possibly empty."""
    if isinstance(cell, str):
        return [label.strip() for label in cell.split(SEPARATOR) if label.strip()]
    if not isinstance(cell, Sequence) or not all(isinstance(label, str | int) and label != "" for label in cell):
        fix = "write a list of labels, or a text such as one|two; [] or an empty text for none"
        raise RecipeError(f"{place()}: {column} {cell!r} is not a list of labels for model.task=multi_label: {fix}")
    return list(map(str, cell))


def parse_numbers(cell: Any, place: Callable[[], str], column: str) -> list[float]:
    """Return the numbers of a cell: a number, a list, or a text of one or several with ``|`` between them."""
    parts = cell.split(SEPARATOR) if isinstance(cell, str) else cell if isinstance(cell, Sequence) else [cell]
    try:
        found = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        found = []
    if not found or len(found) < len(parts) or not all(map(isfinite, found)):
        fix = "write a number such as 3.5, or use --model.task single_label if it is a class"
        raise RecipeError(f"{place()}: {column} {cell!r} is not a number, but model.task=regression needs one: {fix}")
    return found


def parse_words(cell: Any, place: Callable[[], str], column: str) -> list[str]:
    """Return the words of a cell, or their tags: a list, or a text with spaces between them."""
    found = cell.split() if isinstance(cell, str) else cell
    is_list = isinstance(found, Sequence) and all(isinstance(word, str | int) and str(word).strip() for word in found)
    if not is_list or not found:
        fix = 'write a list such as ["Ada", "wrote"], or a text with spaces between the words'
        wrong = f"{column} {cell!r:.80} is not a list of words, but model.task=token needs one"
        raise RecipeError(f"{place()}: {wrong}: {fix}")
    return list(map(str, found))


def parse_tagged_words(
    cells: tuple[Any, Any], place: Callable[[], str], columns: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """Return the words of a row, and one tag per word."""
    text, tags = (parse_words(cell, place, column) for cell, column in zip(cells, columns, strict=True))
    if len(text) != len(tags):
        counts = f"{len(text)} words in {columns[0]!r} and {len(tags)} tags in {columns[1]!r}"
        raise RecipeError(f"{place()} has {counts}: give one tag per word for model.task=token")
    return text, tags


class RowLabels:
    """Row labels, decoded from JSON on access: a tuple of floats per class or number, or a list of token classes."""

    def __init__(self, table: Dataset, make: Callable[[Any], Any]) -> None:
        self.table, self.make = table, make

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> Any:
        return self.make(json.loads(self.table.data.column("label_text")[row].as_py()))


def output_names(texts: Sequence[str], task: Task, source: str, column: str) -> list[str]:
    """Return the names of the outputs: labels or tags, unsorted; for regression the column, numbered if several."""
    found = list(map(json.loads, texts))
    if task != "regression":
        return list(dict.fromkeys(name for name in chain.from_iterable(found) if name is not None))
    few, many = min(map(len, found)), max(map(len, found))
    differ = f"{source}: {column} has {few} numbers in one row and {many} in another"
    require(few == many, f"{differ}: write the same number in all rows")
    return [column] if many == 1 else [f"{column}_{number}" for number in range(1, many + 1)]


def row_labels(
    table: Dataset, task: Task, classes: Mapping[str, int], texts: Sequence[str], unknown: Callable[[str, str], str]
) -> RowLabels:
    """Return the labels of ``table`` with the distinct ``texts``; ``unknown`` describes the place of an unknown one."""
    if task == "regression":
        for text in texts:
            if (found := len(json.loads(text))) != len(classes):
                raise RecipeError(f"{unknown(text, f'{found} numbers')}, but {len(classes)} in the training data")
        return RowLabels(table, tuple)
    for text, names in zip(texts, map(json.loads, texts), strict=True):
        for name in names:
            if name is not None and name not in classes:
                known = f"is not one of {', '.join(classes)}, the labels of the training data"
                raise RecipeError(f"{unknown(text, repr(name))} {known}")
    return RowLabels(table, partial(_multi_hot if task == "multi_label" else _encode_token_labels, dict(classes)))


def _multi_hot(classes: Mapping[str, int], names: Sequence[str]) -> tuple[float, ...]:
    return tuple(float(name in names) for name in classes)


def _encode_token_labels(classes: Mapping[str, int], names: Sequence[str | None]) -> list[int]:
    return [IGNORED_LABEL if name is None else classes[name] for name in names]
