"""Datasets of language models. Every batch is int64 ``(n, length)``, padded on the right: ``input_ids``,
``attention_mask``, and ``labels`` as transformers has them, not shifted, -100 where nothing is to be learned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.data.common import local_path
from trainer.data.text import Padded, files_of, placed, require_named, rows_of_hub, shard_files, written_with
from trainer.errors import RecipeError, listed, require, require_choice, require_positive
from trainer.values import Outline

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.data.rows import Rows

TABLES = (".jsonl", ".parquet", ".csv", ".tsv")
_OF_HUB = ("config", "revision", "train_split", "val_split", "test_split")

OUTLINED = 10_000
"""Samples that a plan is made for where nobody knows how many there are."""


@dataclass
class LanguageData(Padded):
    """What the datasets of language models share.

    Args:
        train_files: what is trained on: a file, a folder, or a pattern such as books/**/*.txt; taken in the order of
            their names.
        val_files: for validation (optional).
        test_files: for testing (optional).
        name: instead of files a data set of the Hugging Face hub, or a folder that ``datasets.load_dataset`` reads.
        config: the part of a data set of the hub that has several.
        revision: a branch, tag or commit of the hub's.
        train_split: of the hub's; as everywhere in datasets train[:10%] is a part of a split.
        val_split: of the hub's, for validation (optional).
        test_split: of the hub's, for testing (optional).
        max_length: most tokens of a sample.
        streamed: read Parquet files row group by row group and tokenise each row when it is its turn, as StreamedText.
        shuffle_buffer: samples of a stream that are shuffled with each other, at least.
        val_fraction: share of the training rows held out for validation, whole conversations or documents.
        encoding: of csv and text files, such as cp1252 (Excel's) or latin-1; null is UTF-8, and of csv UTF-16 where the
            file says so.
        separator: between the cells of csv files, a character or tab; null is the one of , ; tab and | that the header
            has most of.
        cache_dir: folder of the cache for tokens; by default that of the datasets library.
        max_bad_samples: samples that may be left out, over all ranks, because nothing can be learned from them.
    """

    tasks = ("language",)

    train_files: str | None = None
    val_files: str | None = None
    test_files: str | None = None
    name: str | None = None
    config: str | None = None
    revision: str | None = None
    train_split: str = "train"
    val_split: str | None = None
    test_split: str | None = None
    max_length: int = 1024
    streamed: bool = False
    shuffle_buffer: int = 10_000
    val_fraction: float = 0.0
    val_fold: int | None = None
    encoding: str | None = None
    separator: str | None = None
    cache_dir: str | None = None

    belonging: ClassVar[Mapping[str, Sequence[str]]] = {
        "train_files": ("name", *_OF_HUB, "val_files", "test_files"),
        "name": ("train_files", "val_files", "test_files", *_OF_HUB),
    }
    """What goes with other data than a flag or YAML names by the first, and is left out unless it is named as well."""

    answers: ClassVar[bool] = False
    """Whether what a model writes answers a text, or a list of messages; else it goes on with it."""

    _kinds: ClassVar[Sequence[str]] = TABLES  # of files that are read of a folder
    _called: ClassVar[str]  # what a row is

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_length > 1, "data.max_length=1 leaves nothing to predict: raise it")
        require_positive("data.shuffle_buffer", self.shuffle_buffer)
        self._separator = written_with(self.encoding, self.separator)
        if self.train_files is not None and self.name is not None:
            raise RecipeError(
                f"data.train_files={self.train_files!r} and data.name={self.name!r} exclude each other: give one"
            )
        for key in ("val_files", "test_files") if self.name else ("val_split", "test_split", "config", "revision"):
            value, fits = getattr(self, key), "train_files" if self.name else "name"
            require(value is None, f"data.{key}={value!r} goes with data.{fits}, which is not given: leave it out")
        for key, off in (("name", None), ("val_fraction", 0)) if self.streamed else ():
            if getattr(self, key) != off:
                raise RecipeError(
                    f"data.{key}={getattr(self, key)!r} is not for data.streamed: give files for each part by "
                    "data.train_files and data.val_files"
                )

    def require_files(self) -> None:
        """Refuse folders and patterns of nothing."""
        if self.name is not None:
            require_named(self.name)
            return
        if self.train_files is None:
            raise RecipeError(
                "data.train_files is missing: give a file, folder or pattern, or by data.name a data set of the hub"
            )
        for part in ("train", "val", "test"):
            self._paths(part)

    def _paths(self, part: str) -> list[Path]:
        pattern = getattr(self, f"{part}_files")
        key = f"data.{part}_files={pattern!r}"
        if pattern is None:
            return []
        return (
            shard_files(key, pattern)
            if self.streamed
            else files_of(key, pattern, [f"**/*{one}" for one in self._kinds])
        )

    def outline(self) -> Outline | None:
        """Samples as long as ``max_length`` allows, where they are of the hub and not here."""
        from trainer.data.rows import is_cached

        if self.name is None or local_path(self.name).is_dir() or is_cached(self.name, self.cache_dir):
            return None
        held, parts = math.ceil(self.val_fraction * OUTLINED), (self.val_split, self.test_split)
        val, test = (OUTLINED if part else 0 for part in parts)
        tensors = dict.fromkeys(("input_ids", "attention_mask", "labels"), ("int64", (self.max_length,)))
        return Outline(tensors, OUTLINED - held, held or val, test, length=self.max_length)

    def prepare(self, tokenizer: Any = None) -> None:
        """Read, check and tokenise; what was tokenised before is taken from the cache. Says what there is to learn."""
        from trainer.data.cache import cache_folder
        from trainer.data.sequences import Sequences, Survey, padder, tokenised

        self.require_files()
        self._pad = padder(tokenizer, self.max_length)
        reader, cache = self._reader(tokenizer), cache_folder(self.cache_dir)
        if self.streamed:
            self._prepare_stream(reader, cache)
            return
        found = rows_of_hub(self) if self.name else {part: self._rows(part, reader, cache) for part in self._given()}
        survey, parts = Survey(self._called, self.max_length), dict[str, Sequences]()
        for part, rows in found.items():
            several = rows if isinstance(rows, list) else [rows]
            every = Sequences([tokenised(one, reader, cache) for one in several], several, self._pad)
            parts[part] = every.of(survey(part, every))
        survey.check(self.max_bad_samples)
        for part, split in parts.items():
            files = getattr(self, f"{part}_files")
            key = f"data.name={self.name!r}, {part}" if self.name else f"data.{part}_files={files!r}"
            require(len(split) > 0, f"{key}: there is no {self._called} with words in it: name other files")
        self.train, held = parts["train"].parted(self.val_fraction, self.val_fold)
        self.val, self.test = parts.get("val", held), parts.get("test")

    def _given(self) -> list[str]:
        return [part for part in ("train", "val", "test") if getattr(self, f"{part}_files") is not None]

    def _rows(self, part: str, reader: Any, cache: Path) -> list[Rows]:
        """The tables of a split, and all its other files as one, each of which is a text."""
        from trainer.data.rows import CsvFormat, find_file, find_lines, find_texts
        from trainer.data.sequences import say

        found: list[Rows] = []
        texts: list[Path] = []
        for path in self._paths(part):
            if path.suffix.lower() == ".jsonl":
                found.append(find_lines(path, cache, partial(reader.columns, str(path))))
            elif path.suffix.lower() in TABLES:
                found.append(find_file(path, cache, CsvFormat(self.encoding, self._separator)))
            else:
                require(self._called == "document", f"{path} is none of {', '.join(TABLES)}: convert it to one of them")
                texts.append(path)
        folder = local_path(str(getattr(self, f"{part}_files")))
        if folder.is_dir():
            taken = {*self._kinds}
            others = Counter(
                path.suffix or path.name for path in folder.rglob("*") if path.suffix not in taken and path.is_file()
            )
            if others:
                kinds = listed([f"{kind} ({count:,})" for kind, count in others.most_common()])
                say(f"{folder}: files of other kinds are not read: {kinds}; a pattern such as **/*.rs takes any")
        return [*found, *([find_texts(str(folder), texts, cache, self.encoding or "utf-8")] if texts else [])]

    def _prepare_stream(self, reader: Any, cache: Path) -> None:
        from trainer.data.sequences import FromStream
        from trainer.data.shards import StreamedSplit, find_shards

        for part in ("train", "val", "test"):
            if part not in self._given():
                continue
            shards = find_shards(self._paths(part), cache)
            columns = [reader.columns(shard.path, shard.columns) for shard in shards]
            for shard, names in zip(shards, columns, strict=True):
                if names != columns[0]:
                    raise RecipeError(
                        f"{shard.path} has {listed(names)}, and {shards[0].path} {listed(columns[0])}: a stream needs "
                        "the same columns in all files"
                    )
            files = listed([shard.path for shard in shards])
            require(any(shard.groups for shard in shards), f"data.{part}_files: no rows in {files}")
            # What is evaluated is read from the first row to the last: one row group at a time is enough.
            mixed = self.shuffle_buffer if part == "train" else 1
            setattr(self, part, StreamedSplit(shards, FromStream(reader, columns[0]), self._pad, mixed))

    def _reader(self, tokenizer: Any) -> Any:
        """What makes tokens of rows."""
        raise NotImplementedError

    def encode(self, texts: Sequence[Any], tokenizer: Any) -> dict[str, Tensor]:
        """Batch prompts without labels: users' words, messages of conversations, or beginnings of documents; uncut."""
        from trainer.data.sequences import padder

        given = [text for text, _ in placed(texts)]
        found = self._reader(tokenizer).prompts(given)
        return padder(tokenizer, max(map(len, found)))({"input_ids": found})


@dataclass
class Conversations(LanguageData):
    """Conversations with an assistant, written by the tokenizer's chat template, from .jsonl, .parquet, .csv or .tsv
    files or the hub.

    A row has messages, a list of ``{"role": ..., "content": ...}`` (or ShareGPT's ``from`` and ``value``; in csv as
    JSON), or else a prompt and a completion: texts, or such lists. A column ``tools``, JSON schemas of functions that a
    model may call, goes to the template as well.

    Args:
        messages_column: null takes messages, or conversations.
        prompt_column: where there are no messages, what the user says.
        completion_column: where there are no messages, what the assistant answers.
        chat_template: null is the tokenizer's own; else a file with one in Jinja, the text of one, or chatml, for a
            tokenizer that has its tokens. It is saved with the model, and what ends a turn becomes its end of text.
        loss_on: assistant learns the assistant's words, with the token that ends its turn; all learns every token.
    """

    messages_column: str | None = None
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    chat_template: str | None = None
    loss_on: Literal["assistant", "all"] = "assistant"

    answers = True
    _called = "conversation"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("data.loss_on", self.loss_on, Literal["assistant", "all"])

    def _reader(self, tokenizer: Any) -> Any:
        from trainer.data.sequences import ChatReader

        pair, template = (self.prompt_column, self.completion_column), self.chat_template
        if self._pad is None and getattr(tokenizer, "chat_template", None):
            template = None  # to predict: the model was saved with it, and a file of it may be elsewhere
        return ChatReader(tokenizer, self.max_length, self.messages_column, pair, template, self.loss_on)

    def _prepare_stream(self, reader: Any, cache: Path) -> None:
        if "strftime_now" in reader.template:
            raise RecipeError(
                "data.chat_template: the template writes today's date (strftime_now), and a stream is tokenised anew "
                "in every epoch: give it with a date that stays"
            )
        super()._prepare_stream(reader, cache)


@dataclass
class Documents(LanguageData):
    """Texts to read on from: files of which each is a document (.txt, .md, .rst, .py; by a pattern any), or .jsonl,
    .parquet, .csv and .tsv files, or the hub, with a document in each row.

    After each document stands the tokenizer's end of text. One of more than ``max_length`` tokens is cut in pieces that
    overlap by a token: every token but the first of a document is predicted once. Of a stream only the first piece is
    read.

    Args:
        text_column: of rows.
    """

    text_column: str = "text"

    _kinds = (*TABLES, ".txt", ".md", ".rst", ".py")
    _called = "document"

    def _reader(self, tokenizer: Any) -> Any:
        from trainer.data.sequences import DocumentReader

        return DocumentReader(tokenizer, self.max_length, self.text_column)
