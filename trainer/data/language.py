"""Datasets of language models. Every batch is int64 ``(n, length)``, padded on the right: ``input_ids``,
``attention_mask`` and, as in transformers, unshifted ``labels`` with -100 for ignored tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.contract import Data, Model, Packable, capability
from trainer.data.base import local_path
from trainer.data.rows import RowSource, check_columns, find_chat_columns, find_pair_columns, first_rows
from trainer.data.text import PARTS, PaddedDataset, csv_format, glob_files, load_hub_rows, require_dataset_name
from trainer.errors import RecipeError, format_list, require, require_choice, require_positive
from trainer.values import DataSpec, Task

if TYPE_CHECKING:
    from torch import Tensor

MAX_CHECKED_ROWS = 10_000  # rows of a file that are checked before torch is imported
DEFAULT_PLANNED_SAMPLES = 10_000  # number of samples that a plan assumes if it is unknown
TABLES = (".jsonl", ".parquet", ".csv", ".tsv")
_HUB_SETTINGS = ("config", "revision", "train_split", "val_split", "test_split")


@dataclass
class LanguageData(PaddedDataset):
    """Base class of the datasets of language models.

    Args:
        train_files: training files: a file, a folder, or a pattern such as books/**/*.txt; sorted by name.
        val_files: validation files (optional).
        test_files: test files (optional).
        name: instead of files a dataset of the Hugging Face hub, or a folder that ``datasets.load_dataset`` reads.
        config: the configuration of a hub dataset that has several.
        revision: a branch, tag or commit of the hub dataset.
        train_split: training split of the hub dataset; as in datasets, train[:10%] is a part of a split.
        val_split: validation split of the hub dataset (optional).
        test_split: test split of the hub dataset (optional).
        max_length: max number of tokens of a sample.
        streamed: read Parquet files by row group and tokenise each row when it is loaded, as StreamedText.
        shuffle_buffer: min number of samples of a stream that are shuffled with each other.
        val_fraction: share of the training rows held out for validation: whole conversations or documents.
        encoding: encoding of csv and text files, such as cp1252 (Excel's) or latin-1; null is UTF-8, or UTF-16 for csv
            files that start with its byte order mark.
        separator: separator of the cells of csv files, a character or tab; null chooses the one of , ; tab and | that
            is most frequent in the header.
        cache_dir: folder of the cache for tokens; by default that of the datasets library.
        max_bad_samples: max number of samples, over all ranks, that are skipped because nothing can be learned from
            them.
    """

    tasks: ClassVar[Sequence[Task]] = ("language",)

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
        "train_files": ("name", *_HUB_SETTINGS, "val_files", "test_files"),
        "name": ("train_files", "val_files", "test_files", *_HUB_SETTINGS),
    }
    """Settings of a recipe that are dropped if a flag or YAML sets the key, unless they are set there as well."""

    answers: ClassVar[bool] = False
    _extensions: ClassVar[Sequence[str]] = TABLES  # suffixes of files that are read from a folder
    _sample_noun: ClassVar[str]  # word for a row in messages

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_length > 1, "data.max_length=1 leaves nothing to predict: raise it")
        require_positive("data.shuffle_buffer", self.shuffle_buffer)
        self._format = csv_format(self.encoding, self.separator)
        both = f"data.train_files={self.train_files!r} and data.name={self.name!r}"
        require(self.train_files is None or self.name is None, f"{both} exclude each other: give one")
        for key in ("val_files", "test_files") if self.name else ("val_split", "test_split", "config", "revision"):
            value, fits = getattr(self, key), "train_files" if self.name else "name"
            require(value is None, f"data.{key}={value!r} needs data.{fits}, which is not set: leave it out")
        for key, off in (("name", None), ("val_fraction", 0)) if self.streamed else ():
            if (value := getattr(self, key)) != off:
                cause = f"data.{key}={value!r} is not supported with data.streamed"
                raise RecipeError(f"{cause}: give files for each part by data.train_files and data.val_files")

    def require_files(self) -> None:
        if self.name is not None:
            require_dataset_name(self.name)
            return
        fix = "give a file, folder or pattern, or a dataset of the hub by data.name"
        require(self.train_files is not None, f"data.train_files is missing: {fix}")
        for path in (path for part in PARTS for path in self._paths(part)):
            if path.suffix.lower() == ".jsonl":
                _, columns, whole = first_rows(path, most=MAX_CHECKED_ROWS)
                if whole:  # later lines may have other columns
                    self._check_columns(str(path), columns)

    def for_evaluation(self, model: Model | None = None, path: str | None = None) -> Data:
        """Return a dataset of the test files alone."""
        files = path or self.test_files
        if files is None or self.name is not None:
            return self if path is None else super().for_evaluation(model, path)
        return replace(self, train_files=files, val_files=None, test_files=files, val_fraction=0.0, val_fold=None)

    def _paths(self, part: str) -> list[Path]:
        pattern = getattr(self, f"{part}_files")
        if self.streamed or pattern is None:
            return self._shard_files(part)
        return glob_files(f"data.{part}_files={pattern!r}", pattern, [f"**/*{one}" for one in self._extensions])

    def spec(self) -> DataSpec | None:
        """Return the spec of hub data that is not downloaded yet, with samples of ``max_length`` tokens."""
        from trainer.data.tables import is_cached

        if self.name is None or local_path(self.name).is_dir() or is_cached(self.name, self.cache_dir):
            return None
        held, parts = math.ceil(self.val_fraction * DEFAULT_PLANNED_SAMPLES), (self.val_split, self.test_split)
        val, test = (DEFAULT_PLANNED_SAMPLES if part else 0 for part in parts)
        tensors = dict.fromkeys(("input_ids", "attention_mask", "labels"), ("int64", (self.max_length,)))
        return DataSpec(tensors, DEFAULT_PLANNED_SAMPLES - held, held or val, test, length=self.max_length)

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        """Read, check and tokenise the data, using the cache, and print a summary."""
        from trainer.data.cache import cache_folder
        from trainer.data.language_samples import Sequences, TruncationReport, make_padder, tokenize_rows

        self.use_model(model)
        self.require_files()
        self._pad = make_padder(tokenizer, self.max_length)
        reader, cache = self._reader(tokenizer), cache_folder(self.cache_dir)
        if self.streamed:
            self._prepare_stream(reader, cache)
            return
        found = {part: self._rows(part, reader, cache) for part in self._sources()}
        if self.name:
            found = {part: [rows] for part, rows in load_hub_rows(self).items()}
        survey, parts = TruncationReport(self._sample_noun, self.max_length, reader), dict[str, Sequences]()
        for part, rows in found.items():
            every = Sequences([tokenize_rows(one, reader, cache) for one in rows], rows, self._pad)
            parts[part] = every.of(survey(part, every))
        survey.check(self.max_bad_samples)
        for part, split in parts.items():
            files = f"data.{part}_files={getattr(self, f'{part}_files')!r}"
            key = f"data.name={self.name!r}, {part}" if self.name else files
            require(len(split) > 0, f"{key}: every {self._sample_noun} is empty: give other files")
        self.train, held = parts["train"].split_off(self.val_fraction, self.val_fold)
        self.val, self.test = parts.get("val", held), parts.get("test")

    def _sources(self) -> list[str]:
        return [part for part in PARTS if getattr(self, f"{part}_files") is not None]

    def _rows(self, part: str, reader: Any, cache: Path) -> list[RowSource]:
        """Return the tables of a split; its text files form one table."""
        from trainer.data.language_samples import warn_once
        from trainer.data.tables import open_json_lines, open_table, open_text_files

        found: list[RowSource] = []
        texts: list[Path] = []
        for path in self._paths(part):
            if path.suffix.lower() == ".jsonl":
                found.append(open_json_lines(path, cache, partial(reader.columns, str(path))))
            elif path.suffix.lower() in TABLES:
                found.append(open_table(path, cache, self._format))
            else:
                require(self._sample_noun == "document", f"{path} must be one of {', '.join(TABLES)}: convert it")
                texts.append(path)
        folder = local_path(str(getattr(self, f"{part}_files")))
        if folder.is_dir():
            others = [path for path in folder.rglob("*") if path.suffix not in self._extensions and path.is_file()]
            if others:
                counts = Counter(path.suffix or path.name for path in others)
                kinds = format_list([f"{kind} ({count:,})" for kind, count in counts.most_common()])
                warn_once(f"{folder}: skipping files of other types: {kinds}; a pattern such as **/*.rs reads any type")
        return [*found, *([open_text_files(str(folder), texts, cache, self.encoding or "utf-8")] if texts else [])]

    def _prepare_stream(self, reader: Any, cache: Path) -> None:
        from trainer.data.language_samples import FirstSamplePerRow
        from trainer.data.shards import StreamedSplit, find_shards, require_rows

        for part in self._sources():
            shards = find_shards(self._paths(part), cache)
            columns = [reader.columns(shard.path, shard.columns) for shard in shards]
            for shard, names in zip(shards, columns, strict=True):
                cause = f"{shard.path} has {format_list(names)}, but {shards[0].path} has {format_list(columns[0])}"
                require(names == columns[0], f"{cause}: a stream needs the same columns in all files")
            require_rows(f"data.{part}_files", shards)
            encode = FirstSamplePerRow(reader, columns[0])
            setattr(self, part, StreamedSplit(shards, encode, self._pad, self._mixed(part)))

    def _reader(self, tokenizer: Any) -> Any:
        raise NotImplementedError

    def _check_columns(self, source: str, found: Sequence[str]) -> None:
        """Refuse a file without the columns to read."""

    def encode(self, texts: Sequence[Any], tokenizer: Any) -> dict[str, Tensor]:
        """Batch prompts without labels and without truncation: user texts, messages, or beginnings of documents."""
        from trainer.data.language_samples import make_padder

        found = self._reader(tokenizer).prompts([text for text, _ in self._name_texts(texts)])
        return make_padder(tokenizer, max(map(len, found)))({"input_ids": found})


@dataclass
class Conversations(LanguageData):
    """Conversations with an assistant, from .jsonl, .parquet, .csv or .tsv files or the hub.

    A row has messages, a list of ``{"role": ..., "content": ...}`` (or ShareGPT's ``from`` and ``value``; in csv as
    JSON), or a prompt and a completion, which are texts or such lists, or Alpaca's ``instruction``, ``input`` and
    ``output``. The tokenizer's chat template formats them. It also gets the column ``tools``, if present: JSON schemas
    of functions that the model may call.

    Args:
        messages_column: column of the messages; null uses messages or conversations.
        prompt_column: column of the user's text if there are no messages.
        completion_column: column of the assistant's answer if there are no messages.
        chat_template: null is the tokenizer's template; otherwise a Jinja file, Jinja text, or chatml if the tokenizer
            has its tokens. It is saved with the model, and the token that ends a turn becomes the end of text.
        loss_on: assistant trains on the assistant's text, with the token that ends its turn; all on every token.
    """

    messages_column: str | None = None
    prompt_column: str = "prompt"
    completion_column: str = "completion"
    chat_template: str | None = None
    loss_on: Literal["assistant", "all"] = "assistant"

    answers = True
    _sample_noun = "conversation"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("data.loss_on", self.loss_on, Literal["assistant", "all"])

    def _reader(self, tokenizer: Any) -> Any:
        from trainer.data.language_samples import ChatReader

        pair, template = (self.prompt_column, self.completion_column), self.chat_template
        if self._pad is None and getattr(tokenizer, "chat_template", None):
            template = None  # for prediction: the saved tokenizer has the template, and its file may have moved
        return ChatReader(tokenizer, self.max_length, self.messages_column, pair, template, self.loss_on)

    def _check_columns(self, source: str, found: Sequence[str]) -> None:
        find_chat_columns(source, found, self.messages_column, (self.prompt_column, self.completion_column))

    def _prepare_stream(self, reader: Any, cache: Path) -> None:
        cause = "data.chat_template writes today's date (strftime_now), but a stream is tokenised again per epoch"
        require("strftime_now" not in reader.template, f"{cause}: give a template with a fixed date")
        super()._prepare_stream(reader, cache)


@dataclass
class Documents(LanguageData):
    """Documents for language models, one per text file, or one per row of tables or of a hub dataset.

    Text files are .txt, .md, .rst, .py, or any matched by a pattern; tables are .jsonl, .parquet, .csv and .tsv. The
    tokenizer's end of text follows each document. A document of more than ``max_length`` tokens is split into pieces
    that overlap by one token, so that each token except the first is predicted once. For a masked language model,
    the pieces do not overlap, and each is between the tokenizer's special tokens, such as [CLS] and [SEP]. A stream
    uses only the first piece.

    Args:
        text_column: column of the text in tables.
    """

    text_column: str = "text"

    tasks = ("language", "masked_language")
    _extensions = (*TABLES, ".txt", ".md", ".rst", ".py")
    _sample_noun = "document"

    def _reader(self, tokenizer: Any) -> Any:
        from trainer.data.language_samples import DocumentReader, MaskedDocumentReader

        reader = MaskedDocumentReader if self._task == "masked_language" else DocumentReader
        return reader(tokenizer, self.max_length, self.text_column)

    def _check_columns(self, source: str, found: Sequence[str]) -> None:
        check_columns(source, found, text_column=self.text_column)


@dataclass
class Preferences(LanguageData):
    """Pairs of a chosen and a rejected answer to the same prompt, for ``model.loss`` dpo, ipo, orpo and simpo.

    A row has a prompt, chosen and rejected: texts or lists of messages. Without a prompt, chosen and rejected are
    conversations, and the messages with which both begin are the prompt. The loss covers only the text of the assistant
    after the prompt, with the token that ends its turn.

    Args:
        prompt_column: column of the prompt; null uses prompt, question or instruction, if there is one.
        chosen_column: column of the chosen answer; null uses chosen, chosen_response or response_chosen.
        rejected_column: column of the rejected answer; null uses rejected, rejected_response or response_rejected.
        chat_template: as in Conversations; plain concatenates the texts, with the end of text after each answer.
    """

    prompt_column: str | None = None
    chosen_column: str | None = None
    rejected_column: str | None = None
    chat_template: str | None = None

    tasks: ClassVar[Sequence[Task]] = ("preference", "language")  # language only until model.loss is set
    answers = True
    _sample_noun = "pair"

    def __post_init__(self) -> None:
        super().__post_init__()
        cause = "data.streamed=true is not supported with Preferences, whose reference log-probabilities belong to rows"
        require(not self.streamed, f"{cause}: leave it out")

    def use_model(self, model: Model | None) -> None:
        super().use_model(model)
        cause = "Preferences is for model.loss=dpo, ipo, orpo or simpo, but the loss is next_token"
        require(model is None or model.task != "language", f"{cause}: set model.loss, or use Conversations")

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        """Read, check and tokenise the pairs, using the cache, and print a summary."""
        from trainer.data.language_samples import Pairs

        super().prepare(tokenizer, model)
        packs = capability(self._model or Model(), Packable).packs()
        self.train, self.val, self.test = (one and Pairs(one, packs) for one in (self.train, self.val, self.test))

    def spec(self) -> DataSpec | None:
        """Return the spec of hub data that is not downloaded yet, with two texts of ``max_length`` tokens per pair."""
        if (found := super().spec()) is None:
            return None
        tensors = {name: (dtype, (2, *shape)) for name, (dtype, shape) in found.tensors.items()}
        return replace(found, tensors={**tensors, "reference": ("float64", (2,))}, length=2 * self.max_length)

    def _reader(self, tokenizer: Any) -> Any:
        from trainer.data.language_samples import PreferenceReader

        return PreferenceReader(tokenizer, self.max_length, self._columns(), self.chat_template)

    def _columns(self) -> dict[str, str | None]:
        return {"prompt": self.prompt_column, "chosen": self.chosen_column, "rejected": self.rejected_column}

    def _check_columns(self, source: str, found: Sequence[str]) -> None:
        find_pair_columns(source, found, self._columns())
