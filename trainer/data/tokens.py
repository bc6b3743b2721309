"""Tokenised text: tokenised once, cached on disk without padding, padded when batches are collated."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from trainer.contract import PADDING_MULTIPLE, Samples
from trainer.data.cache import get_or_build, hash_of
from trainer.data.fingerprint import ContentHasher, add_rows, sample_row_blocks, tokenizer_hash
from trainer.data.labels import RowLabels, parse_labels, parse_numbers, parse_tagged_words, row_labels
from trainer.data.rows import RowSource, check_columns, has_text, is_missing, reject_gaps, reject_label
from trainer.errors import RecipeError, require
from trainer.system.environment import is_local_rank_zero
from trainer.system.status_line import say
from trainer.system.text import escaped
from trainer.values import IGNORED_LABEL, Task

if TYPE_CHECKING:  # otherwise imported where used: predictions need neither datasets nor pandas
    import datasets

CHARS_PER_BATCH = 2_000_000  # max characters that a tokenizer gets at once, which takes some hundred MB
MAX_CHARS_PER_TOKEN = 1_000  # limit of a text, per token of ``max_length``
MIN_CHARS_LIMIT = 1_000_000  # min of that limit, about a whole book
_STORED = ("input_ids", "token_type_ids")
FILE = "tokens.arrow"
Missing = Literal["error", "drop"]
PAIR = "pair"  # label text of every row of model.task=pairs


class Padder:
    """Collates tokenised samples: pads them to the longest, rounded up, but never beyond ``max_length``."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.settings = (max_length, tokenizer.pad_token_id, tokenizer.padding_side)

    def __call__(self, samples: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
        """Pad samples, or their columns, to ``input_ids``, ``attention_mask`` and others ``(n, length)``; all int64."""
        columns = samples if isinstance(samples, Mapping) else {key: [s[key] for s in samples] for key in samples[0]}
        if isinstance(columns["input_ids"][0][0], list):  # several texts per sample
            columns = {key: [*chain(*column)] if key in _STORED else column for key, column in columns.items()}
        longest = max(map(len, columns["input_ids"]))
        batch = self.tokenizer.pad(
            {key: columns[key] for key in _STORED if key in columns},
            padding="max_length",
            max_length=min(-(-longest // PADDING_MULTIPLE) * PADDING_MULTIPLE, self.max_length),
            return_attention_mask=True,
            return_tensors="pt",
            verbose=False,
        )
        length = batch["input_ids"].shape[1]
        for name in ("labels", "words"):  # values per text, or lists with one value per token
            if name in columns:
                values = columns[name]
                batch[name] = torch.tensor(self._pad_values(values, length) if isinstance(values[0], list) else values)
        return dict(batch)

    def _pad_values(self, values: Sequence[list[int]], length: int) -> list[list[int]]:
        gaps = [[IGNORED_LABEL] * (length - len(one)) for one in values]
        left = self.tokenizer.padding_side == "left"
        return [gap + one if left else one + gap for one, gap in zip(values, gaps, strict=True)]


class Tokens(Samples):
    """The ``chosen`` rows of a memory-mapped ``table`` (:func:`tokenize_table`) of ``rows``, and labels ``of_rows``."""

    lengths: Sequence[int]
    chosen: Sequence[int]

    def __init__(
        self, table: datasets.Dataset, of_rows: Sequence[int] | RowLabels, rows: RowSource, pad: Padder, chosen: Any
    ) -> None:
        self.table, self.of_rows, self.rows, self.pad = table, of_rows, rows, pad
        self.chosen, lengths = chosen, table.data.column("length").to_numpy()
        if not isinstance(chosen, range):  # a range covers all rows and takes no memory
            self.chosen = to_int64_array(chosen)
            lengths = lengths[self.chosen]
        self.lengths = to_int64_array(lengths)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.chosen[index]
        return {**self._stored(row), "labels": self.of_rows[row]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = [self.chosen[index] for index in indices]
        return self.pad({**self._stored(rows), "labels": [self.of_rows[row] for row in rows]})

    @property
    def labels(self) -> Sequence[Any]:  # type: ignore[override]
        """The label of every sample."""
        return [self.of_rows[row] for row in self.chosen]

    def _stored(self, rows: int | list[int]) -> dict[str, Any]:
        found = self.table[rows]
        return {key: found[key] for key in _STORED if key in found}

    def describe(self, index: int) -> str:
        return self.rows.describe(self.chosen[index])

    def fingerprint(self) -> str:
        """Hash every token (up to 1 GiB; above that, evenly spread blocks of texts), length and label, in order."""
        labels = self.labels
        labels = list(chain.from_iterable(labels)) if isinstance(labels[0], list) else labels
        content = ContentHasher("tokens", np.asarray(self.lengths), np.asarray(labels), self.pad.settings)
        table = self.table.select_columns([key for key in _STORED if key in self.table.column_names])
        for block in sample_row_blocks(len(self), 4 * sum(self.lengths)):
            add_rows(content, table, [self.chosen[position] for position in block])
        return content.hexdigest()


def check_tokenizer(tokenizer: Any, max_length: int) -> None:
    """Check that the tokenizer exists and supports ``max_length``."""
    require(tokenizer is not None, "text data needs a text model: use one with model.tokenizer, such as TextClassifier")
    limit, special = tokenizer.model_max_length, tokenizer.num_special_tokens_to_add()
    key = f"data.max_length={max_length}"
    require(max_length <= limit, f"{key} is more than the {limit} tokens of the model's tokenizer: lower it")
    require(max_length > special, f"{key} leaves no room for text with {special} special tokens: raise it")
    cause = "the tokenizer of model.tokenizer has no padding token"
    require(tokenizer.pad_token is not None, f"{cause}: choose another, or set its pad_token")


def encode(texts: Sequence[Any], tokenizer: Any, max_length: int) -> dict[str, list[list[int]]]:
    """Tokenise and truncate to ``input_ids``, and ``token_type_ids`` if the tokenizer has them. Tuples are pairs of
    texts. Lists of words also get ``words``: a word's index for its first token, otherwise -100."""
    found: dict[str, list[list[int]]] = {}
    cut = bool(texts) and isinstance(texts[0], list)
    slow = "maps tokens to words, but that of model.tokenizer is slow: choose another"
    require(not cut or tokenizer.is_fast, f"model.task=token needs a fast tokenizer, which {slow}")
    for chunk in text_batches(texts):
        read = list(map(list, zip(*chunk, strict=True))) if isinstance(chunk[0], tuple) else [chunk]
        encoded = run_tokenizer(tokenizer, *read, truncation=True, max_length=max_length, is_split_into_words=cut)
        for key in _STORED:
            if key in encoded:
                found.setdefault(key, []).extend(encoded[key])
        if cut:
            found.setdefault("words", []).extend(_first_subwords(encoded.word_ids(row)) for row in range(len(chunk)))
    return found


def run_tokenizer(tokenizer: Any, *texts: Sequence[Any], **options: Any) -> Any:
    """Encode texts with ``tokenizer``, without attention masks. A failure becomes a one-line ``RecipeError``."""
    try:
        return tokenizer(*texts, return_attention_mask=False, verbose=False, **options)
    except Exception as error:  # its Rust code raises a bare Exception
        raise RecipeError(f"the tokenizer of model.tokenizer cannot encode a text ({error}): choose another") from error


def _first_subwords(words: Sequence[int | None]) -> list[int]:
    """Return the word index of each token that starts a word, and -100 for other and special tokens."""
    pairs = zip(words, [None, *words[:-1]], strict=True)
    return [IGNORED_LABEL if word is None or word == before else word for word, before in pairs]


def text_batches(texts: Sequence[Any]) -> Iterator[list[Any]]:
    """Split ``texts`` into chunks of up to :data:`CHARS_PER_BATCH` characters; a longer text is alone."""
    chunk: list[Any] = []
    characters = 0
    for text in texts:
        size = len(text) if isinstance(text, str) else sum(map(len, text))
        if chunk and characters + size > CHARS_PER_BATCH:
            yield chunk
            chunk, characters = [], 0
        chunk.append(text)
        characters += size
    yield chunk


def require_text(text: Any, place: Callable[[], str], max_length: int, column: str) -> None:
    """Reject a missing, empty or long text at ``place``: a tokenizer needs 100 bytes per character to truncate it."""
    require(has_text(text), f"{place()} has no text in {column!r}: add it or remove the row")
    if len(text) > (most := max_chars(max_length)):
        cause = f"{place()} has {len(text):,} characters in {column!r}, and the max is {most:,}"
        raise RecipeError(f"{cause} with data.max_length={max_length}: cut it, or remove the row")


def max_chars(max_length: int) -> int:
    return max(MIN_CHARS_LIMIT, MAX_CHARS_PER_TOKEN * max_length)


def require_label(label: Any, place: Callable[[], str], column: str) -> None:
    """Reject an empty label."""
    if is_missing(label):
        raise RecipeError(f"{place()} has no {column}: add it or remove the row")


def to_int64_array(values: Any) -> array[int]:
    """Return integers in an array, 8 bytes each; a list takes 36."""
    return array("q", np.asarray(values, dtype=np.int64).tobytes())


def tokenize_table(
    rows: RowSource,
    text_column: str,
    label_column: str,
    tokenizer: Any,
    max_length: int,
    cache: Path,
    task: Task = "single_label",
    pair_column: str | None = None,
    negative_column: str | None = None,
    padded: bool = False,
) -> datasets.Dataset:
    """Return the tokens of every row, with ``length`` and ``label_text``, using the cache on disk. The latter is the
    label, or JSON of the task's labels: names, numbers, or tags per token, null within words; null if the row has no
    text or no label. Rows of the task pairs have the tokens of each text in a list; ``length`` counts all of them, or
    if they are ``padded``, those of the longest times the number of texts."""
    paired, others = task == "pairs", {"pair_column": pair_column, "negative_column": negative_column}
    asked = ([] if task == "single_label" else [task]) + [f"and {name}" for name in others.values() if name]
    asked += ["padded"] if padded else []
    wanted = {"text_column": text_column} | ({} if paired else {"label_column": label_column})
    wanted |= {key: name for key, name in others.items() if name}
    state = text_column, label_column, max_length, tokenizer_state_hash(tokenizer)
    key = hash_of("tokens with gaps", rows.content, *state, *asked)

    def pick(found: Sequence[str]) -> Sequence[str]:
        check_columns(rows.source, found, **wanted)
        return [*wanted.values()]

    def encode_rows(cells: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        told: list[Any] = []
        texts, *pairs = (cells[name] for name in wanted.values())
        labels = [PAIR] * len(texts) if paired else pairs.pop(0)
        for row, (index, text, label) in enumerate(zip(indices, texts, labels, strict=True)):
            place = partial(rows.describe, index)
            # An empty text has no labels in a row with several.
            gone = [text is None if task == "token" else not has_text(text), *(not has_text(one[row]) for one in pairs)]
            if any(gone) or label is None or (task != "multi_label" and is_missing(label)):
                told.append(None)
                texts[row] = {"token": ["-"]}.get(task, ("-",) * (1 + len(pairs)) if pairs else "-")  # never used
                continue
            if task == "token":
                texts[row], label = parse_tagged_words((text, label), place, (text_column, label_column))
                text = " ".join(texts[row])
            require_text(text, place, max_length, text_column)
            for other, name in zip(pairs, filter(None, others.values()), strict=True):
                require_text(other[row], place, max_length, name)
                texts[row] = *(texts[row] if isinstance(texts[row], tuple) else [text]), other[row]
            read: Any = {"multi_label": parse_labels, "regression": parse_numbers}.get(task)
            told.append(label if read is None else read(label, place, label_column))
        tokens: dict[str, list[Any]] = encode([*chain(*texts)] if paired else texts, tokenizer, max_length)
        if task == "token":
            firsts = zip(told, tokens.pop("words"), strict=True)
            told = [tags and [None if word == IGNORED_LABEL else tags[word] for word in row] for tags, row in firsts]
        lengths = [len(ids) for ids in tokens["input_ids"]]
        if paired:
            rows_of = partial(_cut, size=1 + len(pairs))
            tokens = {key: rows_of(values) for key, values in tokens.items()}
            lengths = [len(row) * max(row) if padded else sum(row) for row in rows_of(lengths)]
        write = str if task in ("single_label", "pairs") else json.dumps
        return {**tokens, "length": lengths, "label_text": [None if one is None else write(one) for one in told]}

    return build_table(rows, key, pick, encode_rows, cache)


def _cut(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def build_table(
    rows: RowSource,
    key: str,
    pick: Callable[[Sequence[str]], Sequence[str]],
    encode_rows: Callable[[Mapping[str, list[Any]], list[int]], dict[str, list[Any]]],
    cache: Path,
    **options: Any,
) -> datasets.Dataset:
    """Return the table that ``encode_rows`` makes from the columns that ``pick`` selects, cached on disk by ``key``."""

    def build(folder: Path) -> None:
        where = {"cache_file_name": str(folder / FILE), "new_fingerprint": key, "desc": f"tokenising {rows.source}"}
        with TemporaryDirectory(dir=folder) as scratch:
            table = rows.read(scratch)
            table = table.select_columns(list(pick(table.column_names)))
            names = table.column_names
            table.map(encode_rows, batched=True, with_indices=True, remove_columns=names, **where, **options)

    import datasets

    return datasets.Dataset.from_file(str(get_or_build(cache, key, f"the tokens of {rows.source}", build) / FILE))


def tokenizer_state_hash(tokenizer: Any) -> str:
    """Return a hash of everything that determines a tokenizer's output; all of a tokenizer without a Rust backend."""
    from datasets.fingerprint import Hasher

    whole = tokenizer if getattr(tokenizer, "backend_tokenizer", None) is None else None
    return Hasher.hash((type(tokenizer).__name__, tokenizer_hash(tokenizer), whole))


def label_texts(table: datasets.Dataset) -> list[str]:
    """Return the distinct labels of a table from :func:`tokenize_table`."""
    return pc.unique(table.data.column("label_text")).drop_null().to_pylist()


def complete_rows(table: datasets.Dataset, rows: RowSource, missing: Missing) -> Sequence[int]:
    """Return the rows of a table of :func:`tokenize_table` that have a text and a label, which must be all of them if
    ``missing`` is error."""
    is_gap = pc.is_null(table.data.column("label_text")).to_numpy()
    gaps = np.flatnonzero(is_gap).tolist()
    if not gaps:
        return range(len(table))
    cause = reject_gaps(gaps, len(table), rows.describe, missing)
    if is_local_rank_zero():
        say(escaped(f"data: leaving out rows: {cause}"))
    return np.flatnonzero(~is_gap).tolist()


def label_ids(
    table: datasets.Dataset, rows: RowSource, column: str, classes: Mapping[str, int], task: Task = "single_label"
) -> array[int] | RowLabels:
    """Return the label of every row of a table of :func:`tokenize_table`; reject labels not in ``classes``."""
    if task not in ("single_label", "pairs"):

        def where(text: str, found: str) -> str:
            return f"{rows.describe(pc.index(table.data.column('label_text'), text).as_py())}: {column} {found}"

        return row_labels(table, task, classes, label_texts(table), where)
    texts = table.data.column("label_text")
    places = pc.index_in(texts, value_set=pa.array(list(classes), pa.string()))
    unknown = pc.and_(places.is_null(), texts.is_valid())
    if pc.any(unknown).as_py():
        index = pc.index(unknown, True).as_py()
        reject_label(rows.describe(index), column, table[index]["label_text"], classes)
    numbers = np.array(list(classes.values()))[places.fill_null(0).to_numpy()]
    return to_int64_array(np.where(texts.is_valid().to_numpy(), numbers, IGNORED_LABEL))
