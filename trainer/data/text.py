"""Text datasets. Every batch is int64: ``input_ids`` and ``attention_mask`` ``(n, length)``, ``labels`` ``(n,)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import escape, glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.contract import Data, Model, Packable, capability, splits_of
from trainer.data import rows as table_rows
from trainer.data.base import BuiltinDataset, ClassWeightedDataset, format_counts, local_path
from trainer.data.rows import KINDS, CsvFormat, RowSource, check_columns, first_rows, has_text, is_missing
from trainer.errors import RecipeError, format_list, require, require_choice, require_positive
from trainer.system.environment import is_local_rank_zero
from trainer.system.status_line import say
from trainer.system.text import escaped
from trainer.values import DataSpec

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.data.shards import Shard
    from trainer.data.tokens import Tokens


PUBLIC_IMDB = "stanfordnlp/imdb"
MAX_CHECKED_ROWS = 100_000
CLASS_COLUMN = "name the column of the classes"
MIN_ROWS_OF_IDS = 10  # min number of rows with one label each that are rejected, because the labels are not classes
MAX_FLOAT_CLASSES = 20  # max number of distinct non-integer labels that are treated as classes, such as half stars
PARTS = ("train", "val", "test")


class PaddedDataset(BuiltinDataset):
    """Base class of datasets that need a tokenizer."""

    max_length: int
    shuffle_buffer: int
    pair_column: str | None = None  # settings of datasets that support pairs
    negative_column: str | None = None

    _pad: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data.max_length", self.max_length)

    def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Collate samples of a prepared dataset to a padded batch."""
        require(self._pad is not None, f"{type(self).__name__}: call prepare(tokenizer) before collate")
        return self._pad(samples)

    @staticmethod
    def _name_texts(texts: Sequence[Any]) -> Iterator[tuple[Any, str]]:
        """Yield the user's ``texts``, or lists of messages, each with a name for messages. Rejects empty ones."""
        require(len(texts) > 0, "no texts were given")
        for position, text in enumerate(texts, start=1):
            place = f"text {position} (the first is 1)" if len(texts) > 1 else "the text"
            require(bool(text.strip() if isinstance(text, str) else text), f"{place} is empty")
            yield text, place

    def _mixed(self, part: str) -> int:
        """Evaluation reads from the first row to the last, so one row group at a time is enough."""
        return self.shuffle_buffer if part == "train" else 1

    def _shard_files(self, part: str) -> list[Path]:
        """Return the .parquet files of a split, which are none if it is not set."""
        if (pattern := getattr(self, f"{part}_files")) is None:
            return []
        key = f"data.{part}_files={pattern!r}"
        found = glob_files(key, pattern, ["*.parquet"])
        for name in found:
            cause = f"{key}: {name} is not a .parquet file, and rows of other files cannot be located alone"
            require(name.suffix == ".parquet", f"{cause}: convert it to Parquet first (docs/data.md shows how)")
        return found


@dataclass(kw_only=True)
class Texts(PaddedDataset):
    """Base class of text datasets with labels.

    Args:
        text_column: column of the texts.
        label_column: column of the labels: integers or strings.
        pair_column: column of the second text of each row if a sample is a pair of texts: two sentences, a question
            and a passage; null for single texts.
        negative_column: for model.task pairs: column of a text that does not belong to the pair (optional).
        max_length: max number of tokens; longer texts are truncated.
        cache_dir: folder of the cache for tokens; by default that of the datasets library.
    """

    text_column: str = "text"
    label_column: str = "label"
    max_length: int = 512
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_column == self.label_column:
            raise RecipeError(f"data.text_column and data.label_column are both {self.text_column!r}: they must differ")

    def encode(self, texts: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
        """Make a batch of texts without labels, tokenised, truncated and padded like the dataset's own texts. For the
        task token, texts are split at spaces, and the batch has ``words``, as in trainer.data.tokens.encode."""
        from trainer.data.tokens import Padder, check_tokenizer, encode, require_text

        check_tokenizer(tokenizer, self.max_length)
        for text, place in self._name_texts(texts):
            require_text(text, partial(str, place), self.max_length, "--text")
        read: Sequence[Any] = [text.split() for text in texts] if self._task == "token" else texts
        if self.pair_column is not None:
            read = [tuple(text.split("\t")) for text in texts]
            are_pairs = all(len(text) == 2 and all(map(str.strip, text)) for text in read)
            pair = f"data.pair_column={self.pair_column!r} needs two texts per sample"
            require(are_pairs, f"{pair}: write them with a tab between them")
        return Padder(tokenizer, self.max_length)(encode(read, tokenizer, self.max_length))


@dataclass(kw_only=True)
class _TokenizedDataset(ClassWeightedDataset, Texts):
    """Base class of text datasets that are tokenised before training.

    Args:
        missing: rows without text or label: error names them and ends the run, drop leaves them out.
    """

    missing: Literal["error", "drop"] = "error"

    _known_classes: ClassVar[Sequence[str] | None] = None  # those of a trained model, if the training file is not read

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("data.missing", self.missing, Literal["error", "drop"])

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        from trainer.data import tokens
        from trainer.data.cache import cache_folder

        self.use_model(model)
        tokens.check_tokenizer(tokenizer, self.max_length)
        cache, columns = cache_folder(self.cache_dir), (self.text_column, self.label_column)
        found, task, pair = self._find(cache), self._task, self.pair_column
        wrong = f"data.pair_column={pair!r} is not for model.task=token, which has one label per word"
        require(pair is None or task != "token", f"{wrong}: leave it out")
        given: Any = {"tokenizer": tokenizer, "max_length": self.max_length, "cache": cache, "task": task}
        padded = task == "pairs" and (model is None or not capability(model, Packable).packs())
        given |= {"pair_column": pair, "negative_column": self.negative_column, "padded": padded}
        read: Any = partial(tokens.tokenize_table, **given)
        tables = {part: read(rows, *columns) for part, rows in found.items()}
        usable = {part: tokens.complete_rows(tables[part], rows, self.missing) for part, rows in found.items()}
        rows = usable["train"]
        classes = {tokens.PAIR: 0}  # pairs have no labels
        if task != "pairs":
            classes = self._find_classes(tokens.label_texts(tables["train"]), found["train"].source, len(rows))
        self._pad, said = tokens.Padder(tokenizer, self.max_length), (self.label_column, classes, task)
        labels = {part: tokens.label_ids(tables[part], rows, *said) for part, rows in found.items()}
        strata: Any = [labels["train"][row] for row in rows] if task == "single_label" else [0] * len(rows)
        kept, held = self._hold_out(strata)

        def split(part: str, chosen: Sequence[int]) -> Tokens:
            return tokens.Tokens(tables[part], labels[part], found[part], self._pad, chosen)

        def of_train(positions: Sequence[int]) -> Sequence[int]:
            return positions if isinstance(rows, range) else [rows[position] for position in positions]

        parts = {part: split(part, chosen) for part, chosen in usable.items() if part != "train"}
        self.train, self.test = split("train", of_train(kept)), parts.get("test")
        self.val = split("train", of_train(held)) if held else parts.get("val")
        for part, one in splits_of(self).items() if is_local_rank_zero() else ():
            if part == "test" or self._known_classes is None:
                say(escaped(f"data: {part}: {self._summary(one)}"))

    def _text_columns(self) -> dict[str, str]:
        """Return the columns of the texts of a sample, by setting."""
        paired, pair, negative = self._task == "pairs", self.pair_column, self.negative_column
        fix = "name it by --data.pair_column"
        require(pair is not None or not paired, f"model.task=pairs needs the column of the second texts: {fix}")
        cause = f"data.negative_column={negative!r} is for model.task=pairs"
        require(negative is None or paired, f"{cause}, not {self._task}: leave it out")
        found = {"text_column": self.text_column, "pair_column": pair, "negative_column": negative}
        return {key: name for key, name in found.items() if name is not None}

    def _find_classes(self, texts: Sequence[str], source: str, rows: int) -> dict[str, int]:
        """Set the classes from the distinct labels of the training ``rows``. Return the number of each label."""
        from trainer.data.labels import output_names

        task, known = self._task, self._known_classes
        if task == "regression":
            known = output_names(texts, task, source, self.label_column)
        if known is None:
            texts = texts if task == "single_label" else output_names(texts, task, source, self.label_column)
            require(len(texts) > 0, f"{source}: no row has a label in data.label_column={self.label_column!r}")
            return self._classes(source, texts, rows)
        self._set_classes(known)
        return {name: number for number, name in enumerate(self.class_names)}

    def _summary(self, split: Any) -> str:
        """Describe a split in a line: texts, truncated texts and, of classes, how many texts each has."""
        pairs = self._task == "pairs"
        full = sum(length >= self.max_length for length in split.lengths if not pairs)
        parts = [f"{len(split):,} {'pairs' if pairs else 'texts'}"]
        if self._task == "single_label":
            parts.append(format_counts(Counter(self.class_names[label] for label in split.labels)))
        parts += [f"{100 * full / len(split):.0f} % fill data.max_length={self.max_length}"] if full else []
        return ", ".join(parts)

    def _find(self, cache: Path) -> dict[str, RowSource]:
        raise NotImplementedError

    def _classes(self, source: str, labels: Sequence[str], rows: int) -> dict[str, int]:
        """Set the classes: the distinct ``labels`` of ``rows``, sorted, numbers by value. Return the class of every
        label text."""
        column = f"{source}: data.label_column={self.label_column!r}"
        is_single = self._task == "single_label"
        cause = f"{column} has {len(labels):,} different numbers such as {labels[0]}, which looks like regression"
        require(not (is_single and is_continuous(labels)), f"{cause}: use --model.task regression, or {CLASS_COLUMN}")
        self._set_classes(sort_classes(labels))
        cause = f"{column} is {self.class_names[0]!r} in every row, but a classifier needs two classes or more"
        enough = self.num_classes > 1 or self._task == "multi_label"
        require(enough, f"{cause}: add rows of another class, or {CLASS_COLUMN}")
        like_ids = is_single and len(labels) == rows >= MIN_ROWS_OF_IDS
        require(not like_ids, f"{column} has another value in each of {rows:,} rows, like an id: {CLASS_COLUMN}")
        return {name: index for index, name in enumerate(self.class_names)}


def is_continuous(labels: Iterable[str]) -> bool:
    """Return whether distinct labels are numbers, not all of them integers, and too many to be classes."""
    try:
        numbers = list(map(float, labels))
    except ValueError:  # a word
        return False
    return len(numbers) > MAX_FLOAT_CLASSES and not all(map(float.is_integer, numbers))


def sort_classes(labels: Iterable[str]) -> list[str]:
    """Return the distinct labels, sorted, numbers by value."""
    names = set(labels)
    numbers = all(name.removeprefix("-").isdecimal() and len(name) < 20 for name in names)
    return sorted(names, key=int) if numbers else sorted(names)


@dataclass
class IMDb(_TokenizedDataset):
    """IMDb film reviews, negative (0) or positive (1): 25,000 for training, 25,000 for testing.

    Args:
        root: a dataset on the Hugging Face hub; or a folder, or the file:// URL of one, that contains train.csv and
            test.csv or is an unpacked aclImdb (train/pos, train/neg, test/pos, test/neg).
        label_column: column of the labels: 0 or 1, or negative or positive.
    """

    root: str = PUBLIC_IMDB

    def require_files(self) -> None:
        """Check that the folder exists, unless ``root`` is a name of the hub."""
        require_dataset_name(self.root, "root", with_owner=True)

    def spec(self) -> DataSpec | None:
        """Return the spec of the reviews to download, with ``max_length`` tokens each."""
        from trainer.data.tables import is_cached

        if self.root != PUBLIC_IMDB or local_path(self.root).is_dir() or is_cached(self.root, self.cache_dir):
            return None
        tokens = dict.fromkeys(("input_ids", "attention_mask"), ("int64", (self.max_length,)))
        return self._make_spec(25_000, 25_000, 2, tokens, length=self.max_length)

    def _find(self, cache: Path) -> dict[str, RowSource]:
        from trainer.data.tables import open_class_folders, open_hub_dataset, open_table

        root, parts = local_path(self.root), ("train", "test")
        if not root.is_dir():
            self.require_files()
            splits = {part: part for part in parts}
            advice = "or set data.root to a folder with train.csv and test.csv, or to an unpacked aclImdb folder"
            return open_hub_dataset("root", self.root, splits, advice, self.cache_dir)
        if (root / "train.csv").is_file():
            return {part: open_table(root / f"{part}.csv", cache) for part in parts}
        fix = "set it to a folder with train.csv and test.csv, to an unpacked aclImdb folder, or to stanfordnlp/imdb"
        cause = f"data.root={self.root!r}: {root} contains neither train.csv nor train/pos"
        require((root / "train" / "pos").is_dir(), f"{cause}: {fix}")
        return {part: open_class_folders(root, part, (("neg", 0), ("pos", 1)), cache) for part in parts}

    def _classes(self, source: str, labels: Sequence[str], rows: int) -> dict[str, int]:
        self._set_classes(["negative", "positive"])
        return {"0": 0, "1": 1, "negative": 0, "positive": 1}


@dataclass
class TextFiles(_TokenizedDataset):
    """Custom texts with labels, in .csv, .tsv, .parquet or .jsonl files.

    Classes are the distinct labels of the training file, sorted, numbers by value. The format of a label depends on
    the model's task (docs/tasks.md): one class; several classes with | between them or in a list; one or more numbers;
    or one tag per word, for texts that are lists of words or have spaces between words.

    Args:
        train_file: the training texts: a path or file:// URL.
        val_file: texts for validation (optional).
        test_file: texts for testing (optional).
        val_fraction: share of the training texts held out for validation if there is no val_file.
        encoding: encoding of csv files, such as cp1252 (Excel's) or latin-1; null is UTF-8, or UTF-16 for files that
            start with its byte order mark.
        separator: separator of the cells of csv files, a character or tab; null chooses the one of , ; tab and | that
            is most frequent in the header.
    """

    tasks = ("single_label", "multi_label", "regression", "token", "pairs")

    train_file: str
    val_file: str | None = None
    test_file: str | None = None
    pair_column: str | None = None
    negative_column: str | None = None
    encoding: str | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._format = csv_format(self.encoding, self.separator)

    def require_files(self) -> None:
        for part, path in self._paths().items():
            key = f"data.{part}_file={getattr(self, f'{part}_file')!r}"
            require(not path.is_dir(), f"{key}: {path} is a folder: give a file in it by --data.{part}_file FILE")
            require(path.is_file(), f"{key}: there is no file {path}: give one by --data.{part}_file FILE")
            if path.suffix.lower() in KINDS:
                self._check_start(part, path)

    def _check_start(self, part: str, path: Path) -> None:
        """Check the columns of a table and, if it is small, its texts and classes, before torch is imported."""
        kind = path.suffix.lower()
        rows, columns, whole = first_rows(path, self._format, MAX_CHECKED_ROWS)
        texts = self._text_columns()
        if whole or kind != ".jsonl":  # later lines may have other columns
            labelled = {} if self._task == "pairs" else {"label_column": self.label_column}
            check_columns(str(path), columns, **texts, **labelled)
        labels = [row.get(self.label_column) for row in rows]
        plain = any({type(label) for label in labels} <= {kind, type(None)} for kind in (str, int))
        if not (whole and plain and self._task == "single_label"):
            return  # what arrow makes of these labels is not known here

        def place(index: int) -> str:
            return table_rows.describe_row(str(path), index, *KINDS[kind][1:])

        filled = [all(has_text(row.get(name)) for name in texts.values()) for row in rows]
        used = {at: str(label) for at, label in enumerate(labels) if filled[at] and not is_missing(label)}
        table_rows.reject_gaps([at for at in range(len(rows)) if at not in used], len(rows), place, self.missing)
        if part == "train" and self._known_classes is None:
            self._classes(str(path), list(dict.fromkeys(used.values())), len(used))
        classes = self._known_classes or self.class_names or used.values()
        for at, label in used.items():
            if label not in classes:
                table_rows.reject_label(place(at), self.label_column, label, classes)

    def for_evaluation(self, model: Model | None = None, path: str | None = None) -> Data:
        """Return a dataset of the test file alone: the trained model knows the classes."""
        file = path or self.test_file
        known = model.class_names if model is not None else ()
        if file is None or known is None or (model is not None and model.task == "regression"):
            return self if path is None else replace(self, test_file=path)
        # The test file also stands for the training file, from which nothing is learned.
        found = replace(self, train_file=file, val_file=None, test_file=file, val_fraction=0.0, val_fold=None)
        found._known_classes = list(known)  # type: ignore[misc]
        return found

    def _paths(self) -> dict[str, Path]:
        return {part: local_path(file) for part in PARTS if (file := getattr(self, f"{part}_file")) is not None}

    def _find(self, cache: Path) -> dict[str, RowSource]:
        from trainer.data.tables import open_table

        self.require_files()
        return {part: open_table(path, cache, self._format) for part, path in self._paths().items()}


def csv_format(encoding: str | None, separator: str | None) -> CsvFormat:
    """Return the format, with the ``separator`` as a character; reject an invalid one, and an unknown ``encoding``."""
    with suppress(LookupError):
        "".encode(encoding or "utf-8")
        found = {"tab": "\t", "\\t": "\t"}.get(separator or "", separator)
        is_one = found is None or len(found) == 1
        require(is_one, f"data.separator={separator!r} must be one character, such as ; or |, or tab")
        return CsvFormat(encoding, found)
    known = "use one such as utf-8, utf-16, cp1252 (Excel's), latin-1 or shift_jis"
    raise RecipeError(f"data.encoding={encoding!r} is not an encoding of Python: {known}")


@dataclass
class HubText(_TokenizedDataset):
    """Texts with one label each, from any dataset of the Hugging Face hub, or a folder that datasets can load.

    Classes are those that the dataset names, otherwise the distinct labels of the training split as in TextFiles.

    Args:
        name: a hub dataset, such as stanfordnlp/imdb or nyu-mll/glue; or a folder that ``datasets.load_dataset`` reads,
            for example with .parquet, .csv or .jsonl files called train and test.
        config: the configuration of a dataset that has several, such as mrpc of nyu-mll/glue.
        revision: a branch, tag or commit of the hub dataset.
        train_split: the training texts; as in datasets, train[:10%] is a part of a split.
        val_split: texts for validation (optional).
        test_split: texts for testing, or null; must have labels.
        val_fraction: share of the training texts held out for validation if there is no val_split.
    """

    name: str
    config: str | None = None
    revision: str | None = None
    train_split: str = "train"
    val_split: str | None = None
    test_split: str | None = "test"
    pair_column: str | None = None

    def require_files(self) -> None:
        require_dataset_name(self.name)

    def _find(self, cache: Path) -> dict[str, RowSource]:
        found = load_hub_rows(self)
        self._names = found["train"].names.get(self.label_column)
        return found

    def _classes(self, source: str, labels: Sequence[str], rows: int) -> dict[str, int]:
        named = self._names
        if named is None or self._task != "single_label":
            return super()._classes(source, labels, rows)
        self._set_classes(named)
        return {str(number): number for number in range(len(named))}


def require_dataset_name(name: str, key: str = "name", with_owner: bool = False) -> None:
    """Check that ``name``, the setting ``key``, is a local folder or can be a dataset of the hub."""
    path, slashes = local_path(name), name.count("/")
    looks_local = name.startswith((".", "/", "~", "file:")) or slashes > 1 or (with_owner and not slashes)
    require(path.is_dir() or not looks_local, f"data.{key}={name!r}: there is no folder {path}")


def load_hub_rows(data: Any) -> dict[str, RowSource]:
    """Return the rows of the splits in the settings of ``data``, which are those of :class:`HubText`."""
    from trainer.data.tables import open_hub_dataset

    require_dataset_name(data.name)
    asked = {"train": data.train_split, "val": data.val_split, "test": data.test_split}
    splits = {part: split for part, split in asked.items() if split is not None}
    advice = "and data.config, data.train_split, data.val_split and data.test_split (null if there is none)"
    name = str(path) if (path := local_path(data.name)).is_dir() else data.name
    return open_hub_dataset("name", name, splits, advice, data.cache_dir, data.config, data.revision)


@dataclass
class StreamedText(Texts):
    """Texts with one label each in Parquet files of any number and size, tokenised when they are loaded.

    Only Parquet is supported, because its footers locate each row: a run resumes without reading from the start.

    Args:
        train_files: a folder of .parquet files of training texts, or a pattern such as train-*.parquet; sorted by name.
        val_files: texts for validation (optional).
        test_files: texts for testing (optional).
        classes: the labels, as texts, in the order of their classes; by default those of the training files, sorted,
            numbers by value.
        shuffle_buffer: min number of samples that are shuffled with each other; about that many texts are in memory.
        cache_dir: folder of the cache of footers; by default that of the datasets library.
    """

    train_files: str
    val_files: str | None = None
    test_files: str | None = None
    classes: list[str] | None = None
    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("data.shuffle_buffer", self.shuffle_buffer)

    def require_files(self) -> None:
        for part in PARTS:
            self._shard_files(part)

    def prepare(self, tokenizer: Any = None, model: Model | None = None) -> None:
        """Read the footers of the files; texts are read and tokenised later."""
        from trainer.data.shards import MAX_LABELS, StreamedSplit, TokenizedWithLabels
        from trainer.data.tokens import Padder, check_tokenizer

        self.use_model(model)
        check_tokenizer(tokenizer, self.max_length)
        found = {part: self._find(part) for part in PARTS if getattr(self, f"{part}_files")}
        key = f"data.label_column={self.label_column!r}"
        labels = (label for shard in found["train"] for label in shard.labels)
        names = sort_classes(labels) if self.classes is None else self.classes
        require(names != [] or self.classes == [], f"{key}: no row of the training files has a label: add labels")
        require(len(set(names)) == len(names), "data.classes contains a label twice: give each label once")
        self._set_classes(names)
        only = f"data.train_files={self.train_files!r}: the only class is {self.class_names}"
        require(len(names) > 1, f"{only}, but a classifier needs two or more: add rows of another class")
        require(len(names) <= MAX_LABELS, f"{key} has more than {MAX_LABELS:,} different labels: {CLASS_COLUMN}")
        columns, numbers = (self.text_column, self.label_column), {name: number for number, name in enumerate(names)}
        self._pad = Padder(tokenizer, self.max_length)
        read = TokenizedWithLabels(columns, numbers, self._pad)
        for part, shards in found.items():
            setattr(self, part, StreamedSplit(shards, read, self._pad, self._mixed(part)))

    def _find(self, part: str) -> list[Shard]:
        from trainer.data.cache import cache_folder
        from trainer.data.shards import find_shards, require_rows

        asked = self.label_column if part == "train" and self.classes is None else None
        shards = find_shards(self._shard_files(part), cache_folder(self.cache_dir), asked)
        for shard in shards:
            check_columns(shard.path, shard.columns, text_column=self.text_column, label_column=self.label_column)
        require_rows(f"data.{part}_files={getattr(self, f'{part}_files')!r}", shards)
        return shards


def glob_files(key: str, pattern: str, kinds: Sequence[str]) -> list[Path]:
    """Return the files that match ``pattern``, in which ** matches any folders, sorted by name; for a folder those of
    ``kinds``. ``key`` is the setting, for messages."""
    path, is_url = local_path(pattern), "://" in pattern.removeprefix("file://")
    require(not is_url, f"{key} is not a local path: download the files first (hf download for files of the hub)")
    require(pattern.count("**") <= 8, f"{key:.200}: the pattern contains ** more than 8 times: use it at most 8 times")
    if path.is_dir():
        names = {name for kind in kinds for name in glob(f"{escape(str(path))}/{kind}", recursive=True)}
        suffixes = format_list([Path(kind).suffix for kind in kinds])
        require(len(names) > 0, f"{key}: the folder {path} contains no {suffixes} files: add some")
    else:
        names = {name for name in glob(str(path), recursive=True) if not Path(name).is_dir()}
        require(len(names) > 0, f"{key}: there is no such folder or file: give one by --{key.partition('=')[0]}")
    return sorted(map(Path, names))
